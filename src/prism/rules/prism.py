"""PRISM: forgets like Gated DeltaNet, and writes a rank-L correction computed by an unrolled residual solver.

    S_t = α_t (I - β₁ k₁ k₁ᵀ) S_{t-1} + Σ_l β_l k_l δ_lᵀ

The solver imitates L steps of test-time gradient descent on ½‖σ(Sᵀk) - v‖² without reading S. A short convolution u of
the input (the *anchor*) stands in for Sᵀk, and a linear map p_l of u for σ'. The residual is reduced step by step:

    gelu     δ_l = GELU(p_l ⊙ r_l),             r_{l+1} = r_l - δ_l                        (the paper's loop, Eqs. 9-18)
    closed   δ_l = P_l ⊙ Π_{j<l}(1 - P_j) ⊙ r,  P = σ(p)                                   (the same loop without GELU)

Presets. `paper` (`PaperPrism`) is the paper's layer: every map is a full linear map of u, r₁ = v - u, and all L writes come
from the solver. `lm` (`Prism`, the default) is Gated DeltaNet plus L - 1 solver writes through low-rank maps. It has the
same modules and state-dict names, so that L = 1 *is* Gated DeltaNet; with more writes its output gate is a sigmoid.
rules/parts/writes.py has its writes 2 … L, with several choices of their keys. In the preset `lm` the erase can also have a
strength of its own, and the decay can differ between the channels of a key, α_t then a diagonal matrix that acts first:

    tied      β₁ k₁ k₁ᵀ                head      ε k₁ k₁ᵀ, ε = σ(·)                channel      k₁ (ε ⊙ k₁)ᵀ

Our choices where the paper leaves them open: SiLU on the anchor (Algorithm 1 has it, Eq. 9 not); β = σ(·),
so that the transition never grows; q and every k_l L2-normalised and q scaled by K^-½; α per head, its bias spread so that
α runs from .9 to .999 over the heads; RMSNorm per head before the output projection; u split over heads, which needs
H·V = width (`paper`), or mapped to them by a low-rank W_u (`lm`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import Update
from prism.engine.layer_ops import SOLVERS, solved_writes
from prism.engine.token import DeltaWeights
from prism.rules.delta import RECALL, GatedDelta
from prism.rules.parts import Carry, LowRank, ShortConv, l2_normalize, split_heads
from prism.rules.parts.norms import HeadNorm, gated_output
from prism.rules.parts.writes import KEYS, RESIDUALS, SCALINGS, ResidualWrites, read_name
from prism.rules.rule import (
    RESIDUAL_PROXY,
    Paper,
    Rule,
    Span,
    check_choices,
    check_integers,
    construct,
    per_head,
    set_initial_weights,
)

ERASES = ("tied", "head", "channel")
RECALL_SCALE = (1.0, 0.1)
"""γ of the fastest and the slowest head with start="recall"."""

_PAPER = Paper(
    "PRISM: Parallel Residual Iterative Sequence Model", "Jiang et al. 2026", "https://arxiv.org/abs/2602.10796"
)
_FORGETTING = "per head, and along k₁"
_TRANSITION = "α · Householder"


def default_gate(steps: int, step_scale: float | Sequence[float] | None, gate: bool) -> str:
    """`gate_by` where it is not given: Gated DeltaNet's where the layer is that, or begins as it; else a sigmoid."""
    return "silu" if steps == 1 or step_scale == 0 or not gate else "sigmoid"


class Prism(GatedDelta):
    """PRISM's `lm` layer: Gated DeltaNet plus L - 1 solver writes.

    Args:
        preset: `"lm"` for this layer or `"paper"` for `PaperPrism`, which has fewer options.
        steps: L, the number of writes per token; 1 is Gated DeltaNet itself.
        solver: `"closed"` or `"gelu"`; the default of `paper` is `"gelu"`.
        residual: `"anchored"` starts from v - W_u u, `"value"` from v, `"below"` from v less a map of what the next `prism`
            layer below with this option has read at the token (v in the first one).
        gain: whether the solver has a learned gain; False sets every p_l to 1 (`closed`: every P to ½).
        nonlinearity: whether the solver has its non-linearity, GELU (`closed`: the sigmoid).
        keys: keys of writes 2 … L, in rules/parts/writes.py: `"own"`, `"orthogonal"` (own, orthogonal to k₁), `"convolved"`
            (through a convolution as k₁), `"rotated"` (k₁ turned by learned angles), `"previous"` (k₁ of the previous
            token) or `"shared"` (k₁).
        shared_key: whether all L corrections are written along k₁, as with keys="shared".
        rank: rank of the low-rank maps; by default max(8, width / 32), which adds less than 10 % to the mixer's parameters.
        key_rank: rank of the map to keys 2 … L, by default `rank`; 0 is a full linear map. Where one token carries several
            facts, take `key_dim`: the keys of a narrower map cannot tell many facts apart.
        up_std: initial standard deviation of the second halves of the low-rank maps to keys 2 … L and gains; None: as a
            model initialises every linear map (`initializer_range`).
        step_scale: initial value of γ: a number, or two, between which heads are spread evenly in log (a single head gets
            their geometric mean). None: 1; with start="recall" and a learned γ from 1 to .1, because later writes disturb
            what slow heads recall. With 0 and Gated DeltaNet's weights a model computes what that does (for adapters).
        scaling: γ per `"channel"` or per `"head"`, or `"fixed"` at `step_scale`.
        erase: what is erased along k₁: `"tied"` as much as the first write adds (β₁), `"head"` a strength of its own,
            `"channel"` a strength for each channel of k₁, as in Gated DeltaNet-2, by a low-rank map.
        qkv_conv: whether q, k and v have the short convolution; the anchor has it in any case.
        forget: what has a decay of its own: every `"head"`, or every `"channel"` of a head's keys, by a low-rank map of
            rank V, as in Kimi Delta Attention.
        gate_by: `"sigmoid"`, which never changes the sign of what was read, or `"silu"` as in Gated DeltaNet. None: a
            sigmoid, but SiLU with steps=1 or step_scale=0, where the layer is Gated DeltaNet or begins as it. To compare
            numbers of writes, give all of them one gate.
        timescales: tokens in which untrained heads forget by a factor e: two numbers, between which heads are spread evenly
            in log, or `"drawn"`: at random, mostly from 1 to 100, as Gated DeltaNet is published.
        norm_eps: epsilon of the norm of every head's output.
    """

    name = "prism"
    paper = _PAPER
    objective = RESIDUAL_PROXY
    forgetting = _FORGETTING
    transition = _TRANSITION

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        steps: int = 2,
        solver: str = "closed",
        residual: str = "anchored",
        gain: bool = True,
        nonlinearity: bool = True,
        keys: str = "own",
        shared_key: bool = False,
        rank: int | None = None,
        key_rank: int | None = None,
        up_std: float | None = None,
        step_scale: float | Sequence[float] | None = None,
        scaling: str = "channel",
        erase: str = "tied",
        conv_size: int = 4,
        qkv_conv: bool = True,
        gate: bool = True,
        negative_eigenvalues: bool = False,
        forget: str = "head",
        gate_by: str | None = None,
        timescales: str | Sequence[float] = (1.0, 1024.0),
        start: str = RECALL,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
    ) -> None:
        check_solver(steps, solver)
        check_choices(
            residual=(residual, RESIDUALS), keys=(keys, KEYS), scaling=(scaling, SCALINGS), erase=(erase, ERASES)
        )
        if shared_key and keys not in ("own", "shared"):
            raise ValueError(f"shared_key=True is keys='shared', but keys is {keys!r}: give one of them")
        gate_by = default_gate(steps, step_scale, gate) if gate_by is None else gate_by
        super().__init__(
            width,
            heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_size=conv_size if qkv_conv else 1,
            gate=gate,
            negative_eigenvalues=negative_eigenvalues,
            forget=forget,
            gate_by=gate_by,
            timescales=timescales,
            start=start,
            norm_eps=norm_eps,
        )
        if step_scale is None:
            # A fixed γ is in no file: it stays as it was when models were saved.
            step_scale = RECALL_SCALE if self.recalls and scaling != "fixed" else 1.0
        self.write_rank, self.layer_index = steps, layer_index
        self.hands_over = residual == "below" and steps > 1
        rank = max(8, width // 32) if rank is None else rank
        key_rank = rank if key_rank is None else key_rank
        check_integers(0, rank=rank, key_rank=key_rank, layer_index=layer_index)
        self.erase_by, self.erase = erase, None
        if erase != "tied":
            channels = heads * self.key_dim
            self.erase = LowRank(width, channels, rank) if erase == "channel" else nn.Linear(width, heads, bias=False)
        if steps > 1:
            self.writes = ResidualWrites(
                width,
                heads,
                self.key_dim,
                self.value_dim,
                steps=steps,
                solver=solver,
                residual="value" if residual == "below" and layer_index == 0 else residual,
                gain=gain,
                nonlinearity=nonlinearity,
                keys="shared" if shared_key else keys,
                rank=rank,
                key_rank=key_rank,
                up_std=up_std,
                step_scale=step_scale,
                scaling=scaling,
                conv_size=conv_size,
                layer_index=layer_index,
            )

    @classmethod
    def build(cls, width: int, heads: int, **options: Any) -> Rule:
        preset = options.pop("preset", "lm")
        if preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
        if preset == "paper":
            options.pop("layer_index", None)  # a model sets it; only residual="below" needs it
        return construct(cls if preset == "lm" else PRESETS[preset], width, heads, options)

    @classmethod
    def option_parameters(cls) -> dict[str, inspect.Parameter]:
        """`preset` and the options of `lm`, which include all of `paper`."""
        preset = inspect.Parameter("preset", inspect.Parameter.KEYWORD_ONLY, default="lm", annotation="str")
        return {"preset": preset, **super().option_parameters()}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], Any]:
        """As in `DeltaFamily`; the extra is the gate's map of x and where to put the read, if other layers want it."""
        update, carried, gate = super().update(x, carry, span)
        if self.erase is not None:
            update = self._erasing(update, self.beta_scale * self.erase(x).sigmoid())
        return update, carried, (gate, span.shared if self.hands_over else None)

    def _erasing(self, update: Update, strength: Tensor) -> Update:
        """The update with an erase of another strength: `[B, T, H]`, or `[B, T, H·K]` with erase="channel"."""
        if self.erase_by == "head":
            return replace(update, erase_strength=strength)
        key = split_heads(strength, self.heads) * update.k[..., 0, :]
        return replace(update, erase_strength=None, erase_first=False, erase_key=key, erase_write_first=True)

    def output(self, o: Tensor, x: Tensor, extra: Any) -> Tensor:
        gate, shared = (None, None) if extra is None else extra
        if shared is not None:
            shared[read_name(self.layer_index)] = o
        return super().output(o, x, gate)

    def decoding_weights(self) -> DeltaWeights | None:
        return None if self.erase is not None or self.hands_over else super().decoding_weights()


class PaperPrism(Rule):
    """PRISM's `paper` layer: Eqs. 9-18 and Algorithm 1 as written, every map a full linear map of the anchor.

    Args:
        steps: L, the number of writes per token.
        solver: `"gelu"` or `"closed"`.
        residual: `"anchored"` starts from v - u, `"value"` from v (the ablation without anchor).
        gain: whether the solver has a learned gain; False sets every p_l to 1 (`closed`: every P to ½).
        nonlinearity: whether the solver has its non-linearity, GELU (`closed`: the sigmoid).
        shared_key: whether all L corrections are written along k₁.
        rank: rank of the map to the gains, the largest; None: a full linear map, as in the paper.
        negative_eigenvalues: whether β₁ is 2σ(·) instead of σ(·).
        qkv_conv: whether q, v and every k_l are maps of x with a short convolution, as in Gated DeltaNet, not maps of u.
        gate: whether the output has Gated DeltaNet's gate.
    """

    name = "prism"
    paper = _PAPER
    objective = RESIDUAL_PROXY
    forgetting = _FORGETTING
    transition = _TRANSITION
    shared_maps = ("query", "gate", "out")

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
        rank: int | None = None,
        conv_size: int = 4,
        qkv_conv: bool = False,
        gate: bool = False,
        negative_eigenvalues: bool = False,
    ) -> None:
        check_solver(steps, solver)
        check_choices(residual=(residual, ("anchored", "value")))
        super().__init__(width, heads, per_head(width, heads, key_dim), per_head(width, heads, value_dim), steps)
        if residual == "anchored" and heads * self.value_dim != width:
            raise ValueError(
                f"preset 'paper' takes the residual v - u with u split over the heads: heads · value_dim must be width, "
                f"got {heads} · {self.value_dim} ≠ {width} (or set residual='value')"
            )
        self.steps, self.solver, self.residual, self.nonlinearity = steps, solver, residual, nonlinearity
        self.beta_scale = 2.0 if negative_eigenvalues else 1.0
        keys, values = heads * self.key_dim, heads * self.value_dim
        key_count = 1 if shared_key else steps
        self.sizes = [keys, keys * key_count, values]
        self.conv = ShortConv(width, conv_size)
        self.query = nn.Linear(width, keys, bias=False)
        self.value = nn.Linear(width, values, bias=False)
        self.key = nn.Linear(width, keys * key_count, bias=False)
        self.qkv_conv = ShortConv(sum(self.sizes), conv_size) if qkv_conv else None
        self.gain: nn.Module | None = None
        if gain:
            out = values * steps
            self.gain = nn.Linear(width, out, bias=False) if rank is None else LowRank(width, out, rank)
        self.beta = nn.Linear(width, heads * steps, bias=False)
        self.alpha = nn.Linear(width, heads)
        self.norm = HeadNorm(self.value_dim)
        self.gate = nn.Linear(width, values, bias=False) if gate else None
        self.out = nn.Linear(values, width, bias=False)
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        """α from .9 to .999 over the heads, evenly in log(1 - α); a single head gets the middle, .99."""
        forgotten = torch.logspace(-1, -3, self.heads) if self.heads > 1 else torch.tensor([0.01])
        return {"alpha.bias": torch.logit(1 - forgotten)}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], None]:
        u, conv_state = self.conv(x, carry.get("conv"), span)
        H, L = self.heads, self.steps
        carried = {"conv": conv_state}
        if self.qkv_conv is None:
            q, k, v = self.query(u), self.key(u), self.value(u)
        else:
            joint = torch.cat([self.query(x), self.key(x), self.value(x)], -1)
            joint, carried["qkv"] = self.qkv_conv(joint, carry.get("qkv"), span)
            q, k, v = joint.split(self.sizes, -1)
        q = l2_normalize(split_heads(q, H)) * self.key_dim**-0.5
        k = l2_normalize(k.unflatten(-1, (H, -1, self.key_dim)))  # [B, T, H, L or 1, K]
        v, expected = split_heads(v, H), split_heads(u, H) if self.residual == "anchored" else None
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
        return update, carried, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out(self.norm(o)) if self.gate is None else gated_output(self.norm, o, self.gate(x), self.out)


PRESETS: dict[str, type[Rule]] = {"lm": Prism, "paper": PaperPrism}


def check_solver(steps: int, solver: str) -> None:
    """Raise a ValueError for options of the solver that do not exist."""
    check_integers(steps=steps)
    check_choices(solver=(solver, SOLVERS))
