"""Recurrent = parallel = chunkwise = scan: one memory, computed four ways.

python examples/forms.py
"""

import time

import torch
import torch.nn.functional as F

import prism

torch.manual_seed(0)
B, T, H, L, K, V = 1, 512, 2, 2, 16, 24
keys = F.normalize(torch.randn(B, T, H, L, K), dim=-1)

update = prism.Update(
    q=torch.randn(B, T, H, K),
    k=keys,  # L directions are written at every token,
    w=torch.randn(B, T, H, L, V),  # with these values
    log_decay=-torch.rand(B, T, H) / 10,  # before that, everything decays a little,
    erase_key=keys[..., 0, :],  # and what is stored under the first key
    erase_strength=torch.rand(B, T, H),  # is erased in part
)

reference, _ = prism.memory(update, form="recurrent")
for form in ("recurrent", "parallel", "chunkwise", "scan"):
    prism.memory(update, form=form)  # the first call also loads what the form needs
    start = time.perf_counter()
    o, state = prism.memory(update, form=form)
    error = ((o - reference).norm() / reference.norm()).item()
    print(f"{form:>10}: {1e3 * (time.perf_counter() - start):7.1f} ms   differs from the definition by {error:.1e}")
    assert error < 1e-5

print(f"the memory holds {state[0].numel()} numbers, after {T} tokens as after one")
