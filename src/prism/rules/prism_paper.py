"""PRISM's `paper` preset: Eqs. 9-18 and Algorithm 1 as written, every map a full linear map of the anchor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import Update
from prism.engine.fused import solved_writes
from prism.rules.norms import HeadNorm
from prism.rules.parts import Carry, ShortConv, l2_normalize, split_heads
from prism.rules.prism import Prism, check_solver
from prism.rules.rule import per_head
from prism.rules.span import Span


class PaperPrism(Prism):
    """The `paper` preset.

    Args:
        steps: L, the number of writes.
        solver: `"gelu"` or `"closed"`.
        residual: `"anchored"` starts from v - u, `"value"` from v (the ablation without anchor).
        gain: False sets every p_l to 1 (`closed`: every P to ½).
        nonlinearity: False leaves out GELU (`closed`: the sigmoid).
        shared_key: True writes all L corrections along k₁.
        negative_eigenvalues: β₁ = 2σ instead of σ.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        steps: int = 2,
        solver: str = "gelu",
        residual: str = "anchored",
        gain: bool = True,
        nonlinearity: bool = True,
        shared_key: bool = False,
        conv_size: int = 4,
        negative_eigenvalues: bool = False,
    ) -> None:
        check_solver(steps, solver, residual)
        super().__init__(width, heads, per_head(width, heads, key_dim), per_head(width, heads, value_dim), steps)
        if residual == "anchored" and heads * self.value_dim != width:
            raise ValueError(
                f"preset 'paper' takes the residual v - u with u split over the heads: heads · value_dim must be width, "
                f"got {heads} · {self.value_dim} ≠ {width} (or set residual='value')"
            )
        self.steps, self.solver, self.residual, self.nonlinearity = steps, solver, residual, nonlinearity
        self.beta_scale = 2.0 if negative_eigenvalues else 1.0
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.conv = ShortConv(width, conv_size)
        self.query = nn.Linear(width, keys, bias=False)
        self.value = nn.Linear(width, values, bias=False)
        self.key = nn.Linear(width, keys * (1 if shared_key else steps), bias=False)
        self.gain = nn.Linear(width, values * steps, bias=False) if gain else None
        self.beta = nn.Linear(width, heads * steps, bias=False)
        self.alpha = nn.Linear(width, heads)
        self.norm = HeadNorm(self.value_dim)
        self.out = nn.Linear(values, width, bias=False)
        self.alpha_bias_()

    @torch.no_grad()
    def alpha_bias_(self) -> None:
        """α from .9 to .999 over the heads, evenly in log(1 - α); one head gets the middle, .99."""
        forgotten = torch.logspace(-1, -3, self.heads) if self.heads > 1 else torch.tensor([0.01])
        self.alpha.bias.copy_(torch.logit(1 - forgotten))

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], None]:
        u, window = self.conv(x, carry.get("conv"), span)
        H, L = self.heads, self.steps
        q = l2_normalize(split_heads(self.query(u), H)) * self.key_dim**-0.5
        k = l2_normalize(self.key(u).unflatten(-1, (H, -1, self.key_dim)))  # [B, T, H, L or 1, K]
        v, expected = split_heads(self.value(u), H), split_heads(u, H) if self.residual == "anchored" else None
        p = None if self.gain is None else self.gain(u).unflatten(-1, (H, L, -1))
        beta = self.beta(u).unflatten(-1, (H, L)).sigmoid()
        if self.beta_scale != 1.0:
            beta = torch.cat([self.beta_scale * beta[..., :1], beta[..., 1:]], -1)
        update = Update(
            q,
            k.expand(-1, -1, -1, L, -1),
            solved_writes(v, expected, p, beta, None, self.solver, self.nonlinearity),
            F.logsigmoid(self.alpha(u)),
            erase_strength=beta[..., 0],
            erase_first=True,
            reset=span.reset,
            mask=span.mask,
        )
        return update, {"conv": window}, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out(self.norm(o))
