"""Launch the kernels of a memory with a decay per key channel: sizes, scratch memory and grids, pass by pass."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prism.engine.kernels.memory.channel_configurations import ChannelConfiguration, channel_configuration
from prism.engine.kernels.memory.channel_prepare import channel_prepare_kernel
from prism.engine.kernels.memory.channel_scan import channel_backward_scan_kernel, channel_forward_scan_kernel
from prism.engine.kernels.memory.channel_tokens import channel_tokens_kernel
from prism.engine.kernels.memory.configurations import Tiling
from prism.engine.kernels.runtime import Compiled, rows, tiles

BEFORE, UNDECAYED = 1, 2
"""Flags: q reads the state before the token's decay and writes; the erase reads the undecayed state."""


class ChannelInputs(NamedTuple):
    """Inputs of the channel kernels: J columns per token, contiguous, one dtype; gates in float32.

    An erase looks up `erase_key` (None: the key of column 0) and feeds column 0 with `strength` (None: 1).
    K and V are powers of two ≥ 16. Head h reads group h // (H // G) of q, x and `erase_key`.
    """

    q: Tensor  # [B, T, G, K]
    x: Tensor  # [B, T, G, J, K]
    w: Tensor  # [B, T, H, J, V]
    log_decay: Tensor  # [B, T, H, K]
    erase_key: Tensor | None  # [B, T, G, K]
    strength: Tensor | None  # [B, T, H]
    documents: Tensor | None  # [B, T] int32, numbered from 0 (the incoming state's document)

    @property
    def erases(self) -> bool:
        return self.strength is not None or self.erase_key is not None

    @property
    def configuration(self) -> ChannelConfiguration:
        return channel_configuration(self.q.shape[3], self.w.shape[4], self.w.shape[3], self.w.dtype, self.w.device)


class ChannelTables(NamedTuple):
    """Results of the prepare kernel, which depend on the inputs only. `padded` is T rounded up to whole chunks of C."""

    cumulated: Tensor  # G in base 2, [B, H, padded, K]
    asked: Tensor  # q̃, [B, H, chunks, C, K]
    lookups: Tensor | None  # b̃, [B, H, chunks, C, K]
    keys: Tensor  # x̃, [B, H, chunks, J, C, K]
    carried: Tensor  # e^{G_C}, [B, H, chunks, K]
    grams: Tensor  # N_j, then -β ⊙ M_j, [B, H, chunks, J or 2J, C, C]
    inverse: Tensor | None  # T⁻¹, [B, H, chunks, C, C]
    maps: Tensor | None = None  # the matrix by which each segment multiplies its incoming state, [segments, B, H, K, K]


class ChannelGradients(NamedTuple):
    """Results of the backward pass over the tokens."""

    d_q: Tensor
    d_x: Tensor
    d_log_decay: Tensor
    d_erase_key: Tensor | None
    d_strength: Tensor | None


class ChannelLaunch:
    """The arguments that the kernels share, and one method per pass, as in `launch.py`. `heads` is B · H."""

    def __init__(self, u: ChannelInputs, reads: int) -> None:
        self.u, self.configuration = u, u.configuration
        self.B, self.T, self.G, self.K = u.q.shape
        self.H, self.J, self.V = u.w.shape[2:]
        self.chunk = self.configuration.chunk
        self.chunks = -(-self.T // self.chunk)
        self.padded = self.chunks * self.chunk
        self.heads = self.B * self.H
        self.sizes = (self.T, self.H, self.padded)
        options = (
            u.erases,
            u.erase_key is None,
            u.strength is not None,
            u.documents is not None,
            bool(reads & BEFORE),
            bool(reads & UNDECAYED),
        )
        sizes = (self.K, self.V, self.J, self.H // self.G)
        self.compiled = compiled(*sizes, u.w.dtype, u.w.device, *options, self.configuration)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.u.w.new_empty(shape, dtype=dtype)

    def start(self, kernel: Any, tiling: Tiling, count: int, *arguments: Any, **constants: Any) -> None:
        """Start `count` program instances; `constants` are those that a kernel does not share with the others."""
        self.compiled.program(kernel, tiling, constants).start(count, *arguments)

    def per_segment(self, segments: int) -> int:
        """Chunks per segment."""
        return -(-self.chunks // segments)

    def prepare(self) -> ChannelTables:
        """What depends on the inputs only, for all chunks in parallel."""
        u, C, K, N = self.u, self.chunk, self.K, self.chunks
        tiling = self.configuration.prepare
        B, H, block = self.B, self.H, min(tiling.block, self.K)
        exact = torch.float64 if u.w.dtype == torch.float32 else torch.float32
        tables = ChannelTables(
            cumulated=self.empty(B, H, self.padded, K, dtype=exact),
            asked=self.empty(B, H, N, C, K),
            lookups=self.empty(B, H, N, C, K) if u.erases else None,
            keys=self.empty(B, H, N, self.J, C, K),
            carried=self.empty(B, H, N, K, dtype=torch.float32),
            grams=self.empty(B, H, N, 2 * self.J if u.erases else self.J, C, C),
            inverse=self.empty(B, H, N, C, C) if u.erases else None,
        )
        self.start(
            channel_prepare_kernel, tiling, self.heads * N,
            rows(u.q, C, block), rows(u.x, C, block), rows(u.erase_key, C, block), u.log_decay, u.strength, u.documents,
            tables.cumulated, tiles(tables.asked, C, block), tiles(tables.lookups, C, block), tiles(tables.keys, C, block),
            tables.carried, tiles(tables.grams, C, C), tiles(tables.inverse, C, C), *self.sizes,
            BK=block, C=C, LEVELS=C.bit_length() - 1,
        )  # fmt: skip
        return tables

    def forward_scan(
        self,
        tables: ChannelTables,
        initial: Tensor | None,
        segments: int,
        *,
        o: Tensor | None = None,
        states: Tensor | None = None,
        fed: Tensor | None = None,
        as_map: bool = False,
    ) -> Tensor:
        """The state after each segment, `[segments, B, H, K, V]`, or its map `[…, K, K]`. Writes o, states and fed."""
        tiling, C, K = self.configuration.forward_scan, self.chunk, self.K
        V = K if as_map else self.V
        block = min(tiling.block, V)
        final = self.empty(segments, self.B, self.H, K, V, dtype=torch.float32)
        self.start(
            channel_forward_scan_kernel, tiling, V // block * segments * self.heads,
            rows(self.u.w, C, block), tiles(tables.asked, C, K), tiles(tables.lookups, C, K), tiles(tables.keys, C, K),
            tables.carried, tiles(tables.grams, C, C), tiles(tables.inverse, C, C),
            tiles(initial, K, block), rows(o, C, block), tiles(states, block, K), rows(fed, C, block),
            tiles(final, K, block), *self.sizes, self.per_segment(segments), segments,
            V=V, BV=block, C=C, INITIAL=initial is not None, MAP=as_map, READ=o is not None, SAVED=states is not None,
        )  # fmt: skip
        return final

    def backward_scan(
        self,
        tables: ChannelTables,
        d_o: Tensor,
        d_final: Tensor | None,
        segments: int,
        d_states: Tensor | None = None,
        d_w: Tensor | None = None,
    ) -> Tensor:
        """The gradient of the state before each segment. Writes d_states and d_w."""
        tiling, C, K, V = self.configuration.backward_scan, self.chunk, self.K, self.V
        block = min(tiling.block, V)
        d_initial = self.empty(segments, self.B, self.H, K, V, dtype=torch.float32)
        self.start(
            channel_backward_scan_kernel, tiling, V // block * segments * self.heads,
            tiles(tables.asked, C, K), tiles(tables.lookups, C, K), tiles(tables.keys, C, K), tables.carried,
            tiles(tables.grams, C, C), tiles(tables.inverse, C, C),
            rows(d_o, C, block), tiles(d_final, K, block), tiles(d_states, block, K), rows(d_w, C, block),
            tiles(d_initial, K, block), *self.sizes, self.per_segment(segments), segments,
            V=V, BV=block, C=C, FINAL=d_final is not None, SAVED=d_states is not None,
        )  # fmt: skip
        return d_initial

    def token_gradients(
        self,
        tables: ChannelTables,
        states: Tensor,
        fed: Tensor | None,
        d_o: Tensor,
        d_states: Tensor,
        d_w: Tensor,
        state: Tensor | None,
        d_final: Tensor | None,
    ) -> ChannelGradients:
        """The gradients that are parallel over chunks."""
        u, tiling, C, V = self.u, self.configuration.tokens, self.chunk, self.V
        BK, BV = min(self.configuration.key_block, self.K), min(tiling.block, V)
        blocks = self.K // BK
        d_q, d_x, d_log_decay = torch.empty_like(u.q), torch.empty_like(u.x), torch.empty_like(u.log_decay)
        d_erase_key = None if u.erase_key is None else torch.empty_like(u.erase_key)
        d_strength = None
        if u.strength is not None:
            d_strength = self.empty(self.J * blocks, self.B, self.T, self.H, dtype=torch.float32)
        ends = self._ends(states, d_states, state, d_final)
        self.start(
            channel_tokens_kernel, tiling, blocks * self.chunks * self.B * self.G,
            rows(u.q, C, BK), rows(u.x, C, BK), rows(fed, C, BV), rows(u.w, C, BV), rows(u.erase_key, C, BK), u.strength,
            tables.cumulated, u.documents, tiles(states, BV, BK), rows(d_o, C, BV), tiles(d_states, BV, BK),
            rows(d_w, C, BV), ends, rows(d_q, C, BK), rows(d_x, C, BK), rows(d_erase_key, C, BK), d_strength, d_log_decay,
            *self.sizes, V=V, BK=BK, BV=BV, C=C, LEVELS=C.bit_length() - 1, ENDS=ends is not None,
        )  # fmt: skip
        if d_strength is not None:
            d_strength = d_strength[0] if len(d_strength) == 1 else d_strength.sum(0)
        return ChannelGradients(d_q, d_x, d_log_decay, d_erase_key, d_strength)

    def _ends(self, states: Tensor, d_states: Tensor, state: Tensor | None, d_final: Tensor | None) -> Tensor | None:
        """⟨S, dS'⟩ per channel of the first and the last chunk from the given state and gradient, which are not rounded as the
        saved ones are (`Launch._recompute_ends` says why), `[2, B, H, K]`; None if neither is given."""
        if state is None and d_final is None:
            return None
        ends = []
        for n in (0, self.chunks - 1):
            S = state.mT if n == 0 and state is not None else states[:, :, n].float()
            dS = d_final.mT if n == self.chunks - 1 and d_final is not None else d_states[:, :, n].float()
            ends.append((S * dS).sum(-2))
        return torch.stack(ends)


@lru_cache(256)
def compiled(
    K: int, V: int, J: int, R: int, dtype: torch.dtype, device: torch.device,
    erases: bool, tied: bool, strength: bool, documents: bool, before: bool, undecayed: bool, how: ChannelConfiguration,
) -> Compiled:  # fmt: skip
    """The programs for these sizes, options and tile sizes (`how`), one object per combination."""
    constants = {
        "J": J,
        "K": K,
        "R": R,
        "ERASE": erases,
        "TIED": tied,
        "STRENGTH": strength,
        "DOCUMENTS": documents,
        "BEFORE": before,
        "UNDECAYED": undecayed,
        # Only for the few float32 products: half-precision products run on tensor cores in any case.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
    return Compiled(constants, device)
