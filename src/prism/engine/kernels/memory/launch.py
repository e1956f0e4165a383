"""Launch the chunk memory's kernels: their inputs, sizes, scratch memory and grids."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prism.engine.kernels.memory.backward_queries import backward_queries_kernel
from prism.engine.kernels.memory.backward_scan import backward_decay_kernel, backward_scan_kernel
from prism.engine.kernels.memory.backward_writes import backward_writes_kernel
from prism.engine.kernels.memory.configurations import Configuration, Tiling, configuration
from prism.engine.kernels.memory.forward import forward_scan_kernel, prepare_kernel
from prism.engine.kernels.runtime import compiled, rows, tiles


class KernelInputs(NamedTuple):
    """Inputs of the chunk kernels: J columns per row, contiguous, one dtype; gates in float32. A token has n rows, one per
    sub-step, and head h reads group h // (H // G) of queries and keys.

    An erase looks up `erase_key` (None: the key of column 0) and feeds column 0 with `strength` (None: 1).
    K and V are powers of two ≥ 16.
    """

    q: Tensor  # [B, T, G, K]
    x: Tensor  # [B, T·n, G, J, K]
    w: Tensor  # [B, T·n, H, J, V]
    log_decay: Tensor | None  # [B, T, H]
    erase_key: Tensor | None  # [B, T·n, G, K]
    strength: Tensor | None  # [B, T·n, H]
    documents: Tensor | None  # [B, T] int32, numbered from 0 (the incoming state's document)

    @property
    def erases(self) -> bool:
        return self.strength is not None or self.erase_key is not None

    @property
    def group(self) -> int:
        """H / G, the heads that share queries and keys."""
        return int(self.w.shape[2] // self.q.shape[2])

    @property
    def substeps(self) -> int:
        """n, the rows of a token."""
        return int(self.w.shape[1] // self.q.shape[1])

    @property
    def configuration(self) -> Configuration:
        return configuration(self.q.shape[3], self.w.shape[4], self.w.shape[3], self.w.dtype, self.w.device)


class ChunkTables(NamedTuple):
    """Results of the prepare kernel, which depend on the inputs only. `padded` is T rounded up to whole chunks."""

    cumulated: Tensor | None  # G, [B, H, padded]
    strengths: Tensor | None  # β, [B, H, padded]
    first: Tensor | None  # N_0ᵀ, with an erase, [B, H, padded / step, step, step]
    inverse: Tensor | None  # T⁻¹, the same
    grams: Tensor | None = None  # of all other columns (`prepare_kernel`), which the backward does not need
    maps: Tensor | None = None  # the matrix by which each segment multiplies its incoming state, [segments, B, H, K, K]
    reach: Tensor | None = None  # log2 of how much of a state each step may leave, for segments, [B, H, padded / step]


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

    A step is the chunk of the scans, a chunk that of the parallel passes (`Configuration`). `T` counts rows, which are `tokens`
    times the sub-steps. `heads` is B · H, `groups` is B · G.
    """

    def __init__(self, u: KernelInputs) -> None:
        self.u = u
        self.configuration = u.configuration
        self.B, self.tokens, G, self.K = u.q.shape
        self.T, self.H, self.J, self.V = u.w.shape[1:]
        self.step, self.chunk = self.configuration.step, self.configuration.chunk
        self.chunks = -(-self.T // self.chunk)
        self.padded = self.chunks * self.chunk
        self.heads, self.groups = self.B * self.H, self.B * G
        # The gradients of a group's heads are added up in registers, for which a wide block leaves no room.
        self.key_block = min(self.K, self.configuration.key_block, 128 if u.group == 1 else 64)
        self.key_blocks, self.sides = self.K // self.key_block, 2 if u.erases else 1
        self.sizes = (self.T, self.H, self.padded)
        options = (
            u.erases,
            u.erase_key is None,
            u.strength is not None,
            u.log_decay is not None,
            u.documents is not None,
            u.group,
            u.substeps,
        )
        self.compiled = compiled(self.K, self.V, self.J, u.w.dtype, u.w.device, *options, self.configuration)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.u.w.new_empty(shape, dtype=dtype)

    def per_token(self, z: Tensor | None, count: int, width: int) -> Any:
        """A tensor with one row per token for a kernel: as `rows` describes it, or itself if tokens have several rows."""
        return rows(z, count, width) if self.tokens == self.T else z

    def start(self, kernel: Any, tiling: Tiling, count: int, *arguments: Any, **constants: Any) -> None:
        """Start `count` program instances; `constants` are those that a kernel does not share with the others."""
        self.compiled.program(kernel, tiling, constants).start(count, *arguments)

    def prepare(self, segments: int) -> ChunkTables:
        """The first pass: what depends on the inputs only, for all steps in parallel."""
        u, C, K = self.u, self.step, self.K
        B, H, steps = self.B, self.H, self.padded // self.step
        exact = torch.float64 if u.w.dtype == torch.float32 else torch.float32
        G = None if u.log_decay is None else self.empty(B, H, self.padded, dtype=exact)
        beta = None if u.strength is None else self.empty(B, H, self.padded, dtype=torch.float32)
        first, inverse = (self.empty(B, H, steps, C, C) if u.erases else None for _ in range(2))
        later = 2 * (self.J - 1) if u.erases else self.J
        grams = self.empty(B, H, steps, later, C, C) if later else None
        forgets = segments > 1 and (u.log_decay is not None or u.documents is not None)
        reach = self.empty(B, H, steps, dtype=torch.float32) if forgets else None
        self.start(
            prepare_kernel, self.configuration.prepare_tiling, self.heads * steps,
            self.per_token(u.q, C, K), rows(u.x, C, K), rows(u.erase_key, C, K), u.log_decay, u.strength, u.documents, G, beta,
            tiles(first, C, C), tiles(grams, C, C), tiles(inverse, C, C), reach, *self.sizes, C=C, BOUND=forgets,
        )  # fmt: skip
        return ChunkTables(G, beta, first, inverse, grams, reach=reach)

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
        """The state after each segment, `[segments, B, H, K, V]`, or its map `[…, K, K]`. Writes o, states and fed.

        Without o, and where the reach is known: only what the next segment needs of it, nothing of the last segment.
        """
        u, tiling, C, K = self.u, self.configuration.forward_scan, self.step, self.K
        reach = tables.reach if o is None else None
        if o is None:
            tiling = self.configuration.carry_scan or tiling
        V = K if as_map else self.V
        block = min(tiling.block, V)
        final = self.empty(segments, self.B, self.H, K, V, dtype=torch.float32)
        grams = None if as_map else tables.grams  # a map needs none, and a backward, which may compute one, has none
        self.start(
            forward_scan_kernel, tiling, V // block * segments * self.heads,
            self.per_token(u.q, C, K), rows(u.x, C, K), rows(u.w, C, block), rows(u.erase_key, C, K),
            tables.strengths, tables.cumulated, u.documents,
            tiles(tables.first, C, C), tiles(grams, C, C), tiles(tables.inverse, C, C), reach, tiles(initial, K, block),
            self.per_token(o, C, block), tiles(states, block, K), rows(fed, C, block),
            tiles(final, K, block), *self.sizes, self.per_segment(segments), segments,
            V=V, BV=block, C=C, INITIAL=initial is not None, MAP=as_map, READ=o is not None,
            SAVED=0 if states is None else self.chunk // C, BOUND=reach is not None,
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
        """The gradient of the state before each segment. Writes d_states and column 0 of d_w.

        Without d_states, and where the reach is known: only what the segment before needs, nothing of the first segment.
        """
        reach = tables.reach if d_states is None else None
        u, tiling, C, K, V = self.u, self.configuration.backward_scan, self.step, self.K, self.V
        block = min(tiling.block, V)
        d_initial = self.empty(segments, self.B, self.H, K, V, dtype=torch.float32)
        self.start(
            backward_scan_kernel, tiling, V // block * segments * self.heads,
            self.per_token(u.q, C, K), rows(u.x, C, K), rows(u.erase_key, C, K),
            tables.strengths, tables.cumulated, u.documents, tiles(tables.first, C, C), tiles(tables.inverse, C, C), reach,
            self.per_token(d_o, C, block), tiles(d_final, K, block), tiles(d_states, block, K), rows(d_w, C, block),
            tiles(d_initial, K, block), *self.sizes, self.per_segment(segments), segments,
            V=V, BV=block, C=C, FINAL=d_final is not None,
            SAVED=0 if d_states is None else self.chunk // C, BOUND=reach is not None,
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
        return KeyTiles(self.per_token(u.q, C, BK), rows(u.x, C, BK), rows(u.erase_key, C, BK), rows(d_x, C, BK))

    def _value_tiles(
        self, tiling: Tiling, fed: Tensor | None, d_o: Tensor, d_states: Tensor, d_w: Tensor
    ) -> ValueTiles:
        C, BV = self.chunk, min(tiling.block, self.V)
        return ValueTiles(
            BV,
            rows(self.u.w, C, BV),
            rows(fed, C, BV),
            self.per_token(d_o, C, BV),
            rows(d_w, C, BV),
            tiles(d_states, BV, self.key_block),
        )

    def _query_gradients(
        self, tables: ChunkTables, states: Tensor, narrow: KeyTiles, wide: ValueTiles, out: TokenBuffers
    ) -> None:
        C, BK, count = self.chunk, self.key_block, self.sides * self.key_blocks * self.chunks * self.groups
        self.start(
            backward_queries_kernel, self.configuration.backward_queries, count,
            narrow.q, narrow.x, wide.w if wide.fed is None else wide.fed, wide.w, narrow.erase_key,
            tables.strengths, tables.cumulated, self.u.documents,
            tiles(states, wide.BV, BK), wide.d_o, wide.d_states, wide.d_w,
            self.per_token(out.d_q, C, BK), narrow.d_x, rows(out.d_erase_key, C, BK),
            out.d_strength, out.d_cumulated, out.touched,
            *self.sizes, V=self.V, BK=BK, BV=wide.BV, C=C, STEP=self.step,
        )  # fmt: skip

    def _write_gradients(self, tables: ChunkTables, narrow: KeyTiles, wide: ValueTiles, out: TokenBuffers) -> None:
        self.start(
            backward_writes_kernel, self.configuration.backward_writes, self.key_blocks * self.J * self.chunks * self.groups,
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
