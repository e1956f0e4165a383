"""Recurrent = parallel = chunkwise = scan: one memory, computed four ways.

Run it with `python examples/forms.py`.
"""

import time

import torch

import prism
from prism.rules.parts import l2_normalize

torch.manual_seed(0)
B, T, H, L, K, V = 1, 512, 2, 2, 16, 24
keys = l2_normalize(torch.randn(B, T, H, L, K))

update = prism.Update(
    q=torch.randn(B, T, H, K),
    k=keys,  # L directions are written at every token …
    w=torch.randn(B, T, H, L, V),  # … with these values,
    log_decay=-torch.rand(B, T, H) / 10,  # after everything has faded a little
    erase_key=keys[..., 0, :],  # and what the memory answered the first key with
    erase_strength=torch.rand(B, T, H),  # has been taken back, more or less.
)

reference, _ = prism.memory(update, form="recurrent")
for form in ("recurrent", "parallel", "chunkwise", "scan"):
    start = time.perf_counter()
    o, state = prism.memory(update, form=form)
    error = ((o - reference).norm() / reference.norm()).item()
    print(f"{form:>10}: {1e3 * (time.perf_counter() - start):7.1f} ms   differs from the definition by {error:.1e}")

print(f"the memory holds {state[0].numel()} numbers, after {T} tokens as after one")
