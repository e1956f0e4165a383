"""Launch the chunk memory's kernels: their inputs, sizes, scratch memory and grids."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prism.engine.kernels.backward_scan import backward_decay_kernel, backward_scan_kernel
from prism.engine.kernels.backward_tokens import backward_queries_kernel, backward_writes_kernel
from prism.engine.kernels.configurations import Configuration, Tiling, configuration
from prism.engine.kernels.forward import forward_scan_kernel, prepare_kernel
from prism.engine.kernels.runtime import compiled, rows, tiles


class KernelInputs(NamedTuple):
    """Inputs of the chunk kernels: J columns per token, contiguous, one dtype; gates in float32.

    An erase looks up `erase_key` (None: the key of column 0) and feeds column 0 with `strength` (None: 1).
    K and V are powers of two ≥ 16.
    """

    q: Tensor  # [B, T, H, K]
    x: Tensor  # [B, T, H, J, K]
    w: Tensor  # [B, T, H, J, V]
    log_decay: Tensor | None  # [B, T, H]
    erase_key: Tensor | None  # [B, T, H, K]
    strength: Tensor | None  # [B, T, H]
    documents: Tensor | None  # [B, T] int32, numbered from 0 (the incoming state's document)

    @property
    def erases(self) -> bool:
        return self.strength is not None or self.erase_key is not None

    @property
    def configuration(self) -> Configuration:
        return configuration(self.q.shape[3], self.w.shape[4], self.w.shape[3], self.w.dtype, self.w.device)


class ChunkTables(NamedTuple):
    """Results of the prepare kernel, which depend on the inputs only. `padded` is T rounded up to whole chunks."""

    cumulated: Tensor | None  # G, [B, H, padded]
    strengths: Tensor | None  # β, [B, H, padded]
    grams: Tensor  # [B, H, padded / step, J or 2J, step, step]
    inverse: Tensor | None  # T⁻¹, [B, H, padded / step, step, step]
    maps: Tensor | None = None  # the matrix by which each segment multiplies its incoming state, [segments, B, H, K, K]


class TokenGradients(NamedTuple):
    """Results of the backward passes over the tokens."""

    d_q: Tensor
    d_x: Tensor
    d_erase_key: Tensor | None
    d_strength: Tensor | None
    d_log_decay: Tensor | None


class TokenBuffers(NamedTuple):
    """Memory that the passes over the tokens write: results, and partial sums over `key_blocks` blocks of key channels."""

    d_q: Tensor
    d_x: Tensor
    d_erase_key: Tensor | None
    d_strength: Tensor | None  # [key_blocks, B, T, H]
    d_cumulated: Tensor | None  # [sides + J, key_blocks, B, H, padded]
    tails: Tensor | None  # [J, key_blocks, B, H, padded]
    touched: Tensor | None  # ⟨dS', S⟩ of each chunk, [key_blocks, B, H, chunks]


class KeyTiles(NamedTuple):
    """Descriptors of tiles of `key_block` key channels, for the passes over queries and over writes."""

    q: Any
    x: Any
    erase_key: Any
    d_x: Any


class ValueTiles(NamedTuple):
    """Descriptors of tiles of BV value channels, for one of these passes."""

    BV: int
    w: Any
    fed: Any
    d_o: Any
    d_w: Any
    d_states: Any


class Launch:
    """The arguments that the kernels share, and one method per pass.

    A step is the chunk of the scans, a chunk that of the parallel passes (`Configuration`). `heads` is B · H.
    """

    def __init__(self, u: KernelInputs) -> None:
        self.u = u
        self.configuration = u.configuration
        self.B, self.T, self.H, self.K = u.q.shape
        self.J, self.V = u.w.shape[3:]
        self.step, self.chunk = self.configuration.step, self.configuration.chunk
        self.chunks = -(-self.T // self.chunk)
        self.padded = self.chunks * self.chunk
        self.heads = self.B * self.H
        self.key_block = min(self.K, self.configuration.key_block)
        self.key_blocks, self.sides = self.K // self.key_block, 2 if u.erases else 1
        self.sizes = (self.T, self.H, self.padded)
        options = (
            u.erases,
            u.erase_key is None,
            u.strength is not None,
            u.log_decay is not None,
            u.documents is not None,
        )
        self.compiled = compiled(self.K, self.V, self.J, u.w.dtype, u.w.device, *options, self.configuration)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.u.w.new_empty(shape, dtype=dtype)

    def start(self, kernel: Any, tiling: Tiling, count: int, *arguments: Any, **constants: Any) -> None:
        """Start `count` program instances; `constants` are those that a kernel does not share with the others."""
        self.compiled.program(kernel, tiling, constants).start(count, *arguments)

    def prepare(self) -> ChunkTables:
        """The first pass: what depends on the inputs only, for all steps in parallel."""
        u, C, K = self.u, self.step, self.K
        B, H, steps = self.B, self.H, self.padded // self.step
        exact = torch.float64 if u.w.dtype == torch.float32 else torch.float32
        G = None if u.log_decay is None else self.empty(B, H, self.padded, dtype=exact)
        beta = None if u.strength is None else self.empty(B, H, self.padded, dtype=torch.float32)
        grams = self.empty(B, H, steps, 2 * self.J if u.erases else self.J, C, C)
        inverse = self.empty(B, H, steps, C, C) if u.erases else None
        self.start(
            prepare_kernel, Tiling(K, self.configuration.prepare_warps, 3), self.heads * steps,
            rows(u.q, C, K), rows(u.x, C, K), rows(u.erase_key, C, K), u.log_decay, u.strength, u.documents, G, beta,
            tiles(grams, C, C), tiles(inverse, C, C), *self.sizes, C=C,
        )  # fmt: skip
        return ChunkTables(G, beta, grams, inverse)

    def forward_scan(
        self,
        tables: ChunkTables,
        initial: Tensor | None,
        segments: int,
        *,
        o: Tensor | None = None,
        states: Tensor | None = None,
        fed: Tensor | None = None,
        as_map: bool = False,
    ) -> Tensor:
        """The state after each segment, `[segments, B, H, K, V]`, or its map `[…, K, K]`. Writes o, states and fed."""
        u, tiling, C, K = self.u, self.configuration.forward_scan, self.step, self.K
        V = K if as_map else self.V
        block = min(tiling.block, V)
        final = self.empty(segments, self.B, self.H, K, V, dtype=torch.float32)
        self.start(
            forward_scan_kernel, tiling, V // block * segments * self.heads,
            rows(u.q, C, K), rows(u.x, C, K), rows(u.w, C, block), rows(u.erase_key, C, K),
            tables.strengths, tables.cumulated, u.documents, tiles(tables.grams, C, C), tiles(tables.inverse, C, C),
            tiles(initial, K, block), rows(o, C, block), tiles(states, block, K), rows(fed, C, block),
            tiles(final, K, block), *self.sizes, self.per_segment(segments), segments,
            V=V, BV=block, C=C, INITIAL=initial is not None, MAP=as_map, READ=o is not None,
            SAVED=0 if states is None else self.chunk // C,
        )  # fmt: skip
        return final

    def backward_scan(
        self,
        tables: ChunkTables,
        d_o: Tensor,
        d_final: Tensor | None,
        segments: int,
        d_states: Tensor | None = None,
        d_w: Tensor | None = None,
    ) -> Tensor:
        """The gradient of the state before each segment. Writes d_states and column 0 of d_w."""
        u, tiling, C, K, V = self.u, self.configuration.backward_scan, self.step, self.K, self.V
        block = min(tiling.block, V)
        d_initial = self.empty(segments, self.B, self.H, K, V, dtype=torch.float32)
        self.start(
            backward_scan_kernel, tiling, V // block * segments * self.heads,
            rows(u.q, C, K), rows(u.x, C, K), rows(u.erase_key, C, K),
            tables.strengths, tables.cumulated, u.documents, tiles(tables.grams, C, C), tiles(tables.inverse, C, C),
            rows(d_o, C, block), tiles(d_final, K, block), tiles(d_states, block, K), rows(d_w, C, block),
            tiles(d_initial, K, block), *self.sizes, self.per_segment(segments), segments,
            V=V, BV=block, C=C, FINAL=d_final is not None,
            SAVED=0 if d_states is None else self.chunk // C,
        )  # fmt: skip
        return d_initial

    def token_gradients(
        self,
        tables: ChunkTables,
        states: Tensor,
        fed: Tensor | None,
        d_o: Tensor,
        d_states: Tensor,
        d_w: Tensor,
        state: Tensor | None,
        d_final: Tensor | None,
    ) -> TokenGradients:
        """The gradients that are parallel over chunks. Those of the later writes go to `d_w`, after the first one's."""
        buffers = self._allocate()
        narrow = self._key_tiles(buffers.d_x)
        wide = self._value_tiles(self.configuration.backward_queries, fed, d_o, d_states, d_w)
        self._query_gradients(tables, states, narrow, wide, buffers)
        if self.configuration.backward_writes.block != self.configuration.backward_queries.block:
            wide = self._value_tiles(self.configuration.backward_writes, fed, d_o, d_states, d_w)
        self._write_gradients(tables, narrow, wide, buffers)
        d_strength, d_log_decay = buffers.d_strength, None
        if buffers.touched is not None:
            self._recompute_ends(buffers.touched, states, d_states, state, d_final)
            d_log_decay = self._decay_gradient(tables, buffers)
        if d_strength is not None:
            d_strength = d_strength[0] if self.key_blocks == 1 else d_strength.sum(0)
        return TokenGradients(buffers.d_q, buffers.d_x, buffers.d_erase_key, d_strength, d_log_decay)

    def _allocate(self) -> TokenBuffers:
        u, blocks = self.u, self.key_blocks
        d_strength = d_cumulated = tails = touched = None
        if u.strength is not None:
            d_strength = self.empty(blocks, self.B, self.T, self.H, dtype=torch.float32)
        if u.log_decay is not None:
            gate = (blocks, self.B, self.H, self.padded)
            d_cumulated = self.empty(self.sides + self.J, *gate, dtype=torch.float32)
            tails = self.empty(self.J, *gate, dtype=torch.float32)
            touched = self.empty(blocks, self.B, self.H, self.chunks, dtype=torch.float32)
        d_erase_key = None if u.erase_key is None else torch.empty_like(u.erase_key)
        return TokenBuffers(
            torch.empty_like(u.q), torch.empty_like(u.x), d_erase_key, d_strength, d_cumulated, tails, touched
        )

    def _key_tiles(self, d_x: Tensor) -> KeyTiles:
        u, C, BK = self.u, self.chunk, self.key_block
        return KeyTiles(rows(u.q, C, BK), rows(u.x, C, BK), rows(u.erase_key, C, BK), rows(d_x, C, BK))

    def _value_tiles(
        self, tiling: Tiling, fed: Tensor | None, d_o: Tensor, d_states: Tensor, d_w: Tensor
    ) -> ValueTiles:
        C, BV = self.chunk, min(tiling.block, self.V)
        return ValueTiles(
            BV,
            rows(self.u.w, C, BV),
            rows(fed, C, BV),
            rows(d_o, C, BV),
            rows(d_w, C, BV),
            tiles(d_states, BV, self.key_block),
        )

    def _query_gradients(
        self, tables: ChunkTables, states: Tensor, narrow: KeyTiles, wide: ValueTiles, out: TokenBuffers
    ) -> None:
        C, BK, count = self.chunk, self.key_block, self.sides * self.key_blocks * self.chunks * self.heads
        self.start(
            backward_queries_kernel, self.configuration.backward_queries, count,
            narrow.q, narrow.x, wide.w if wide.fed is None else wide.fed, wide.w, narrow.erase_key,
            tables.strengths, tables.cumulated, self.u.documents,
            tiles(states, wide.BV, BK), wide.d_o, wide.d_states, wide.d_w,
            rows(out.d_q, C, BK), narrow.d_x, rows(out.d_erase_key, C, BK), out.d_strength, out.d_cumulated, out.touched,
            *self.sizes, V=self.V, BK=BK, BV=wide.BV, C=C, STEP=self.step,
        )  # fmt: skip

    def _write_gradients(self, tables: ChunkTables, narrow: KeyTiles, wide: ValueTiles, out: TokenBuffers) -> None:
        self.start(
            backward_writes_kernel, self.configuration.backward_writes, self.key_blocks * self.J * self.chunks * self.heads,
            narrow.q, narrow.x, wide.fed, wide.w, narrow.erase_key,
            tables.strengths, tables.cumulated, self.u.documents,
            wide.d_o, wide.d_states, wide.d_w, narrow.d_x, out.d_cumulated, out.tails,
            *self.sizes, V=self.V, BK=self.key_block, BV=wide.BV, C=self.chunk, STEP=self.step,
        )  # fmt: skip

    def _decay_gradient(self, tables: ChunkTables, sums: TokenBuffers) -> Tensor:
        assert self.u.log_decay is not None
        d_log_decay = torch.empty_like(self.u.log_decay)
        self.start(
            backward_decay_kernel, Tiling(self.chunk, 1), self.chunks * self.heads,
            tables.cumulated, self.u.documents, sums.d_cumulated, sums.tails, sums.touched, d_log_decay,
            *self.sizes, self.heads,
            SLABS=self.sides + self.J, BLOCKS=self.key_blocks, C=self.chunk, STEP=self.step,
        )  # fmt: skip
        return d_log_decay

    def _recompute_ends(
        self, touched: Tensor, states: Tensor, d_states: Tensor, state: Tensor | None, d_final: Tensor | None
    ) -> None:
        """Overwrite ⟨dS', S⟩ of the first and the last chunk, computed from the given state and gradient without rounding: in
        a short sequence this is most of the gates' gradient, and the rounding of S and dS' would be most of its error."""
        last = self.chunks - 1
        ends = {n for n, given in ((0, state), (last, d_final)) if given is not None}
        for n in ends:
            S = state.mT if n == 0 and state is not None else states[:, :, n].float()
            dS = d_final.mT if n == last and d_final is not None else d_states[:, :, n].float()
            touched[1:, :, :, n] = 0.0
            touched[0, :, :, n] = (S * dS).sum((-1, -2))

    def per_segment(self, segments: int) -> int:
        """Steps per segment: whole chunks, so that the saved states are those at chunk borders."""
        return -(-self.chunks // segments) * (self.chunk // self.step)
