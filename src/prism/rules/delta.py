"""DeltaNet and Gated DeltaNet: erase the value stored under a key, then write the new one.

    DeltaNet         S_t = (I - β k kᵀ) S_{t-1} + β k vᵀ                      (Schlag 2021, Yang 2024)
    Gated DeltaNet   S_t = α_t (I - β k kᵀ) S_{t-1} + β k vᵀ                  (Yang, Kautz, Hatamizadeh 2024)

DeltaNet is one gradient step of size β on ½‖Sᵀk - v‖². Gated DeltaNet first lets the memory decay by α, one per head, chosen
by the input. `DeltaFamily` also serves rules with several steps or writes a token (DeltaProduct, PRISM).

Queries and keys go through a short convolution, SiLU and L2 normalisation, so the eigenvalue along k is 1 - β: in [0, 1],
or with `negative_eigenvalues` (β = 2σ) in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prism.engine import Update, token
from prism.engine.compat import is_unmodified
from prism.engine.layer_ops import (
    Columns,
    Corrections,
    conv_columns,
    delta_columns,
    one_operator_serves,
    products_serve,
)
from prism.engine.recompute import cheap
from prism.engine.token import DeltaWeights
from prism.rules.parts import Carry, ShortConv, fused_linears, is_plain_conv, linear_groups, map_weights, recall_taps
from prism.rules.parts.decays import DRAWN, SoftplusDecay, channel_decay
from prism.rules.parts.norms import HeadNorm, gated_output
from prism.rules.parts.writes import ResidualWrites
from prism.rules.rule import (
    DECAYED_REGRESSION,
    REGRESSION,
    Paper,
    Rule,
    Span,
    check_choices,
    check_nonnegative,
    per_head,
)

RECALL = "recall"
STARTS, FORGETS, GATES = (RECALL, DRAWN), ("head", "channel"), ("silu", "sigmoid")


class DeltaFamily(Rule):
    """Base of all rules that erase along the key they write.

    By default nothing decays; `forget_gate` adds a decay per head, and a subclass may set its own `decay_in` and `decay`.

    Args:
        start: `"drawn"`: weights start at random, as published. `"recall"`: an untrained layer already looks up and copies.
            Its keys start equal to its queries; in the second half of the heads (the slower ones, if `timescales` says so)
            a key is that of the token before, so that a token finds what followed it earlier; and the output map starts as
            the transpose of the map to values. Without a convolution keys cannot look back: with conv_size=1 weights are
            drawn.
    """

    shared_maps = ("gate", "out")
    query_first_maps = ("qkv",)
    described = (*Rule.described, "beta_and_decay")

    def __init__(
        self,
        width: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        *,
        gate: bool,
        gate_by: str = "silu",
        conv_size: int = 4,
        negative_eigenvalues: bool = False,
        forget_gate: bool = False,
        timescales: str | Sequence[float] = DRAWN,
        start: str = DRAWN,
        substeps: int = 1,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(width, heads, key_dim, value_dim, write_rank=substeps)
        check_nonnegative(norm_eps=norm_eps)
        check_choices(start=(start, STARTS), gate_by=(gate_by, GATES))
        self.substeps = substeps
        self.beta_scale = 2.0 if negative_eigenvalues else 1.0
        keys, values = heads * key_dim, heads * value_dim
        self.sizes = [keys, substeps * keys, substeps * values]
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.conv = ShortConv(sum(self.sizes), conv_size)
        self.beta = nn.Linear(width, substeps * heads, bias=False)
        self.norm = HeadNorm(value_dim, eps=norm_eps)
        self.gate: nn.Module | None = nn.Linear(width, values, bias=False) if gate else None
        self.gate_by = gate_by
        self.out = nn.Linear(values, width, bias=False)
        self.decay_in: nn.Module | None = nn.Linear(width, heads, bias=False) if forget_gate else None
        self.decay: SoftplusDecay | None = SoftplusDecay(heads, timescales=timescales) if forget_gate else None
        self.writes: ResidualWrites | None = None
        """Further writes of each token after its first; a subclass may set them. Only PRISM has them."""
        self.recalls = start == RECALL and conv_size > 1
        for name, value in DeltaFamily.initial_weights(self).items():  # a subclass's own come when it has been built
            self.get_parameter(name).data.copy_(value)

    def initial_weights(self) -> dict[str, Tensor]:
        return {"conv.weight": recall_taps(self.conv.size, self.heads, self.sizes)} if self.recalls else {}

    def aligned_weights(self, weight: Callable[[str], Tensor]) -> dict[str, Tensor]:
        plain = isinstance(self.qkv, nn.Linear) or hasattr(self.qkv, "maps")  # the latter in a mixture of memories
        if not self.recalls or not plain or not isinstance(self.out, nn.Linear):
            return {}
        query, _, value = weight("qkv.weight").split(self.sizes)
        copied = value[-self.heads * self.value_dim :]  # of a token's last step
        return {"qkv.weight": torch.cat([query, *[query] * self.substeps, value]), "out.weight": copied.mT}

    @property
    def rate_maps(self) -> tuple[nn.Module, ...]:
        """The maps to β and to the decay."""
        return (self.beta,) if self.decay_in is None else (self.beta, self.decay_in)

    def beta_and_decay(self, x: Tensor, mapped: list[Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """β `[B, T·n, H]` for n = `substeps`, and the log-decay: `[B, T, H]`, `[B, T, H, K]` or None.

        Args:
            mapped: the outputs of `rate_maps` of x, if they are known.
        """
        beta, *decay = fused_linears(x, *self.rate_maps) if mapped is None else mapped
        beta = beta.unflatten(-1, (self.substeps, self.heads)).flatten(1, 2)  # [B, T, n·H] -> [B, T·n, H]
        beta = beta.sigmoid() if self.beta_scale == 1.0 else self.beta_scale * beta.sigmoid()
        return beta, None if self.decay is None else self.decay(decay[0])

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], Any]:
        """As in `Rule`; the extra is the gate's map of x, or None if `output` is to compute it."""
        projected, rates, gate, x, u = self._maps(x, carry, span)
        beta, log_decay = self.beta_and_decay(x, rates)
        (q, k, w), carried = self._columns(x, u, projected, beta, carry, span)
        if self.writes is not None:
            k, of_keys = self.writes.placed(k, carry, span)
            carried |= of_keys
        update = Update(
            q,
            k,
            w,
            log_decay,
            erase_strength=beta,
            erase_first=True,
            reset=span.reset,
            mask=span.mask,
            substeps=self.substeps,
        )
        return update, carried, gate

    def _maps(
        self, x: Tensor, carry: Carry, span: Span
    ) -> tuple[Tensor, list[Tensor] | None, Tensor | None, Tensor, Tensor | None]:
        """The outputs of `qkv`, of `rate_maps` and of the gate, x for everything else that reads it, and the anchor; rates,
        gate and anchor are None where they are computed later."""
        gates = [] if self.gate is None else [(self.gate,)]
        # Where one operator computes the columns, the anchor is kept; elsewhere it is computed again with them.
        keeps = products_serve(x) and self._taps_of_one_operator(x, carry.get("conv"), span) is not None
        conv = self.writes.anchor_operands(x, carry, span) if keeps and self.writes is not None else None
        found = linear_groups(x, (self.qkv,), self.rate_maps, *gates, conv=conv)
        if found is None:
            return self.qkv(x), None, None, x, None
        ((projected,), rates, *gated), x, u = found
        return projected, rates, gated[0][0] if gates else None, x, u

    def _columns(
        self, x: Tensor, u: Tensor | None, projected: Tensor, beta: Tensor, carry: Carry, span: Span
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """The columns, and what the next call needs. What is cheap to compute again is not kept for the backward pass.

        u is the anchor, if it is known.
        """
        window, writes = carry.get("conv"), self.writes
        corrections: Corrections | None = None

        def columns(x: Tensor, u: Tensor | None, projected: Tensor, beta: Tensor) -> tuple[Columns, dict[str, Tensor]]:
            mixed, conv_state = self.conv(projected, window, span)
            if writes is None:
                return delta_columns(mixed, beta, self.key_dim, self.substeps), {"conv": conv_state}
            u, anchored = writes.anchor(x, carry, span, u)
            corrections, carried = writes(x, u, carry, span)
            found = delta_columns(mixed, beta, self.key_dim, self.substeps, corrections)
            return found, {"conv": conv_state, **anchored, **carried}

        taps = self._taps_of_one_operator(projected, window, span)
        if taps is None:
            return cheap(columns, x, u, projected, beta)
        # The operator saves its inputs only. To keep q, k, w and the anchor is faster than to compute them again.
        carried = {}
        if writes is not None:

            def later(x: Tensor, u: Tensor) -> tuple[tuple[Tensor, ...], tuple[Corrections, dict[str, Tensor]]]:
                corrections, carried = writes(x, u, carry, span)
                return tuple(z for z in corrections[:4] if z is not None), (corrections, carried)

            u, anchored = writes.anchor(x, carry, span, u)
            _, (corrections, of_writes) = cheap(later, x, u)
            carried = {**anchored, **of_writes}
        found = conv_columns(projected, taps, window, span.documents, beta, self.key_dim, corrections)
        return found, {"conv": self.conv.next_state(projected, window, span), **carried}

    def _taps_of_one_operator(self, x: Tensor, window: Tensor | None, span: Span) -> Tensor | None:
        """The convolution's weights if one operator computes the columns, convolution included, of a projection like x."""
        plain = self.substeps == 1 and span.context is None and is_plain_conv(self.conv) and is_unmodified(self.conv)
        sizes = self.conv.size, self.key_dim, self.value_dim, self.write_rank
        return self.conv.weight if plain and one_operator_serves(x, window, *sizes) else None

    def output(self, o: Tensor, x: Tensor, extra: Tensor | None) -> Tensor:
        if self.gate is None:
            return self.out(self.norm(o))
        return gated_output(self.norm, o, self.gate(x) if extra is None else extra, self.out, self.gate_by)

    def decode(
        self,
        x: Tensor,
        memory: Any,
        carry: Carry,
        shared: dict[str, Tensor] | None = None,
        weights: Any = None,
        overwrite: bool = False,
    ) -> tuple[Tensor, Any, dict[str, Tensor]]:
        """As in `Rule`; `weights` are those of the layer, merged (engine/token.py)."""
        state = token.DeltaState.of(x, weights.layer, memory, carry) if isinstance(weights, token.Merged) else None
        if state is None:
            return super().decode(x, memory, carry, shared, overwrite=overwrite)
        return token.delta(x, weights, state)

    def decoding_weights(self) -> DeltaWeights | None:
        maps = {name: map_weights(getattr(self, name)) for name in ("qkv", "beta", "decay_in", "gate", "out")}
        missing = any(found is None and getattr(self, name) is not None for name, found in maps.items())
        norm = self.norm.decoding_weights() if isinstance(self.norm, HeadNorm) else None
        if missing or not is_plain_conv(self.conv) or norm is None:
            return None
        decay = self.decay.decoding_weights() if isinstance(self.decay, SoftplusDecay) else None
        writes = None if self.writes is None else self.writes.decoding_weights()
        if (decay is None) != (self.decay is None) or (writes is None) != (self.writes is None):
            return None
        return DeltaWeights(
            heads=self.heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            substeps=self.substeps,
            taps=self.conv.weight,
            beta_scale=self.beta_scale,
            decay=decay,
            norm=norm,
            gate_by=self.gate_by,
            writes=writes,
            **maps,  # type: ignore[arg-type]  # what must exist does
        )


def check_gate(gate: bool, gate_by: str) -> None:
    """Refuse the kind of an output gate that a layer does not have."""
    if not gate and gate_by != "silu":
        raise ValueError("gate_by is that of the output gate: set gate=True, or omit it")


class Delta(DeltaFamily):
    """DeltaNet: the delta rule without decay. No output gate by default."""

    name = "delta"
    paper = Paper(
        "Parallelizing Linear Transformers with the Delta Rule", "Yang et al. 2024", "https://arxiv.org/abs/2406.06484"
    )
    objective = REGRESSION
    forgetting = "along the key"
    transition = "Householder"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        gate: bool = False,
        negative_eigenvalues: bool = False,
        start: str = DRAWN,
    ) -> None:
        super().__init__(
            width,
            heads,
            per_head(width, heads, key_dim),
            per_head(width, heads, value_dim),
            gate=gate,
            conv_size=conv_size,
            negative_eigenvalues=negative_eigenvalues,
            start=start,
        )


class GatedDelta(DeltaFamily):
    """Gated DeltaNet: the delta rule after a decay per head.

    Defaults as published: H·K = ¾ width and V = 2K (6 heads of 256 × 512 at width 2048).

    Args:
        key_dim: size of a head's queries and keys; ¾ · width / heads by default.
        value_dim: size of a head's values; 2 · key_dim by default.
        forget: what has a decay of its own: every `"head"`, or every `"channel"` of a head's keys, by a low-rank map of
            rank V, as in Kimi Delta Attention.
        gate_by: `"silu"` as published, or `"sigmoid"`, which never changes the sign of what was read.
        timescales: tokens in which untrained heads forget by a factor e: two numbers, between which heads are spread evenly
            in log, or `"drawn"`: at random, mostly from 1 to 100, as published.
        norm_eps: epsilon of the norm of every head's output.
    """

    name = "gated_delta"
    paper = Paper("Gated Delta Networks", "Yang et al. 2024", "https://arxiv.org/abs/2412.06464")
    objective = DECAYED_REGRESSION
    forgetting = "per head, and along the key"
    transition = "α · Householder"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        gate: bool = True,
        negative_eigenvalues: bool = False,
        forget: str = "head",
        gate_by: str = "silu",
        timescales: str | Sequence[float] = DRAWN,
        start: str = DRAWN,
        norm_eps: float = 1e-5,
    ) -> None:
        check_choices(forget=(forget, FORGETS))
        check_gate(gate, gate_by)
        key_dim = per_head(width, heads, key_dim, ratio=0.75)
        super().__init__(
            width,
            heads,
            key_dim,
            2 * key_dim if value_dim is None else value_dim,
            gate=gate,
            gate_by=gate_by,
            conv_size=conv_size,
            negative_eigenvalues=negative_eigenvalues,
            forget_gate=forget == "head",
            timescales=timescales,
            start=start,
            norm_eps=norm_eps,
        )
        if forget == "channel":
            self.decay_in, self.decay = channel_decay(width, heads, self.key_dim, self.value_dim, timescales)
