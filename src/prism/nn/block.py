"""A layer of a model: norm and mixer, then norm and SwiGLU, each with a residual connection. The SwiGLU is optional."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prism import rules
from prism.engine import compat, token
from prism.engine.layer_ops import plain_linear, residual_norm, residual_sum, swiglu
from prism.engine.recompute import recomputing
from prism.engine.sequence_parallel import Context
from prism.nn.mixer import Mixer, is_plain
from prism.nn.state import State

Summands = tuple[Tensor, Tensor]
"""Two tensors `[B, T, width]` that stand for their sum."""


class SwiGLU(nn.Module):
    """`[…, width]` → `[…, width]`: down(SiLU(gate x) ⊙ up x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x, self.gate, self.up, self.down)


class Merged(NamedTuple):
    """What a layer computes a token from on a CPU; None for a part that is called as a module."""

    norm: token.ScaledNorm | None
    mixer: token.Merged | None
    glu: token.MergedGlu | None


NOTHING = Merged(None, None, None)


class Block(nn.Module):
    """x + mixer(norm x), then x + mlp(norm x).

    Args:
        rule, width, heads, options: as in `Mixer`.
        hidden: width of the SwiGLU; 0 omits it and its norm (in HSTU the gate replaces it).
        eps: epsilon of the norms.
        dropout: dropout probability of both residual branches.

    Attributes:
        recompute: whether training keeps no activation that is cheap to compute again (see prism/engine/recompute.py).
    """

    recompute = False

    def __init__(
        self,
        rule: str | type[rules.Rule],
        width: int,
        heads: int,
        hidden: int,
        eps: float = 1e-6,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(hidden, int) or hidden < 0:
            raise ValueError(f"hidden must be an integer ≥ 0 (0: no SwiGLU), got {hidden!r}")
        self.mixer_norm = nn.RMSNorm(width, eps=eps)
        self.mixer = Mixer(rule, width, heads, **options)
        if hidden:
            self.mlp_norm = nn.RMSNorm(width, eps=eps)
            self.mlp = SwiGLU(width, hidden)
        self.has_mlp = hidden > 0
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor | Summands,
        state: State | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        shared: dict[str, Tensor] | None = None,
        keep_state: bool = True,
        form: str = "auto",
        backend: str = "auto",
        context: Context | None = None,
        defer: bool = False,
    ) -> tuple[Tensor | Summands, State]:
        """x `[B, T, width]` → `[B, T, width]` and the mixer's state; arguments as in `Mixer.forward`.

        Args:
            x: may also be two summands, as `defer` returns them.
            keep_state: whether to return the state. If False the returned state is empty, so that unused tensors are not
                tracked (FSDP warns about conv states, which are views).
            defer: whether to return the output as two summands, so that the next layer sums them up together with its norm.
        """
        x, delta = (x, None) if isinstance(x, Tensor) else x
        # What is recomputed contains the convolution, which would exchange its window again in the backward.
        with recomputing(self.recompute and context is None):
            x, y = residual_norm(x, delta, self.mixer_norm)
            mixed, state = self.mixer(y, state, mask, reset, form, backend, shared, context)
            mixed = self.dropout(mixed)
            if self.has_mlp:
                x, y = residual_norm(x, mixed, self.mlp_norm)
                mixed = self.dropout(self.mlp(y))
            return (x, mixed) if defer else residual_sum(x, mixed), state if keep_state else State()

    def decode(
        self, x: Tensor, state: State, shared: dict[str, Tensor] | None = None, weights: Merged | None = None
    ) -> tuple[Tensor, State]:
        """One token per row, x `[B, width]` → `[B, width]` and the state after it, as `forward` in eval mode.

        The call must be `token.allowed`, and the state is not checked. Parts that have hooks or were replaced are called.

        Args:
            weights: what `merged` returned, for a layer that has not changed since.
        """
        weights = NOTHING if weights is None else weights
        if token.kernels_serve(x) and (found := self._by_kernels(x, state)) is not None:
            return found
        given = None
        if weights.mixer is not None:
            given = token.DeltaState.of(x, weights.mixer.layer, state.memory, state.carry)
        if given is not None and weights.mixer is not None:
            x, memory, carry = token.delta(x, weights.mixer, given)
            state = State(memory, carry)
        elif compat.is_unmodified(self.mixer):
            n = self.mixer_norm(x) if weights.norm is None else weights.norm(x)
            y, state = self.mixer.decode_unchecked(n, state, shared)
            x = x + y
        else:
            y, state = self.mixer(self.mixer_norm(x).unsqueeze(1), state, shared=shared)
            x = x + y.squeeze(1)
        if self.has_mlp:
            x = x + self.mlp(self.mlp_norm(x)) if weights.glu is None else token.glu(x, weights.glu)
        return x, state

    def merged(self) -> Merged:
        """Merged copies of the weights for `decode` on a CPU, as far as the layer can be computed from them."""
        norm = _norm_weights(self.mixer_norm)
        if norm is None or not is_plain(self) or not compat.is_unmodified(self):
            return NOTHING
        mixer = token.Merged.of(self.mixer.rule.current_decoding_weights(), norm)
        return Merged(scaled_norm(self.mixer_norm), mixer, token.MergedGlu.of(self._glu_weights()))

    def _by_kernels(self, x: Tensor, state: State) -> tuple[Tensor, State] | None:
        """`decode` in a few kernels; None if it must be computed otherwise."""
        if not is_plain(self) or not compat.is_unmodified(self):
            return None
        layer, glu = self.mixer.rule.current_decoding_weights(), self._glu_weights()
        norm = _norm_weights(self.mixer_norm)
        if layer is None or not layer.has_kernel or norm is None or (self.has_mlp and glu is None):
            return None
        weights = [*layer.weights, *(() if glu is None else glu[1:])]
        x = x.contiguous()
        before = token.DeltaState.of(x, layer, state.memory, state.carry)
        if before is None or not token.uniform(x, *weights):
            return None
        if not all(p.is_contiguous() and p.device == x.device for p in self.parameters()):
            return None
        # A state that is not contiguous was copied, and the copy would be overwritten.
        overwrite = state.overwrite and all(z.is_contiguous() for z in state.tensors().values())
        x, after = token.delta_by_kernels(x, norm, layer, before.contiguous(), overwrite)
        if glu is not None:
            x = token.glu_by_kernels(x, glu)
        return x, State(state.memory, dict(state.carry)) if overwrite else State(after.memory, after.carry)

    def _glu_weights(self) -> token.GluWeights | None:
        if not self.has_mlp:
            return None
        norm, maps = _norm_weights(self.mlp_norm), (self.mlp.gate, self.mlp.up, self.mlp.down)
        if norm is None or type(self.mlp) is not SwiGLU or not all(map(plain_linear, maps)):
            return None
        return token.GluWeights(norm, *(m.weight for m in maps))


def may_defer(layers: Iterable[nn.Module]) -> bool:
    """Whether each of these blocks can leave its residual sum to the next one: in training, where no hook would see two
    summands."""
    layers = list(layers)
    plain = all(layer.training for layer in layers) and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return plain and all(map(compat.is_unmodified, layers))


def _norm_weights(norm: nn.Module) -> token.Norm | None:
    """The weight and epsilon of an RMSNorm; None if it is another module, or has no weight."""
    if type(norm) is not nn.RMSNorm or norm.weight is None or norm.eps is None:
        return None
    return token.Norm(norm.weight, norm.eps)


def scaled_norm(norm: nn.Module) -> token.ScaledNorm | None:
    """An unmodified RMSNorm in the form for single tokens on a CPU; None for anything else."""
    found = _norm_weights(norm) if compat.is_unmodified(norm) else None
    low = found is None or found.weight.dtype not in (torch.float32, torch.float64) or found.weight.is_inference()
    return None if low or found is None else token.ScaledNorm.of(found, found.weight.dtype)


def place_options(rule: str | type[rules.Rule], index: int, count: int) -> dict[str, int]:
    """`layer_index` and `layer_count`, for rules that depend on the layer's position in the stack; {} for others."""
    accepted = rules.get(rule).option_names()
    return {name: value for name, value in {"layer_index": index, "layer_count": count}.items() if name in accepted}
