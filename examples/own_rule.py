"""A rule of your own, in its own file, registered from outside the library.

    python examples/own_rule.py

Import this file wherever a saved model with the rule is opened: registration lasts as long as the process.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import prism
from prism.models import PrismConfig, PrismForCausalLM


class Leaky(prism.rules.Rule):
    """Linear attention with one forget gate per head and unit keys.

    Args:
        bias: added to the gate's logit; larger values forget more slowly.
    """

    forgetting = "per head"
    transition = "scalar"

    def __init__(self, width: int, heads: int, *, bias: float = 4.0) -> None:
        super().__init__(width, heads, key_dim=width // heads, value_dim=width // heads)
        self.bias = bias
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.forget = nn.Linear(width, heads, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def update(self, x: Tensor, carry: Any, span: Any) -> tuple[prism.Update, dict[str, Tensor], None]:
        q, k, v = (z.unflatten(-1, (self.heads, -1)) for z in self.qkv(x).chunk(3, -1))
        update = prism.Update(
            q=q * self.key_dim**-0.5,  # [B, T, H, K]
            k=F.normalize(k, dim=-1).unsqueeze(-2),  # [B, T, H, 1, K]: one write per token
            w=v.unsqueeze(-2),  # [B, T, H, 1, V]
            log_decay=F.logsigmoid(self.forget(x) + self.bias),  # [B, T, H], ≤ 0
            reset=span.reset,
            mask=span.mask,
        )
        return update, {}, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out(o.flatten(-2))


prism.rules.register("leaky", Leaky)

if __name__ == "__main__":
    torch.manual_seed(0)
    mixer = prism.Mixer("leaky", width=32, heads=2, bias=3.0)
    x = torch.randn(2, 50, 32)
    reference, _ = mixer(x, form="recurrent")
    for form in mixer.forms:
        error = (mixer(x, form=form)[0] - reference).abs().max().item()
        print(f"{form:>10}: differs from the definition by {error:.0e}")
        assert error < 1e-5

    model = PrismForCausalLM(PrismConfig(256, 32, 2, "leaky*3+softmax"))
    written = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False)
    print("a hybrid with it writes", written.shape[1] - 3, "tokens")
