"""Launches of the chunk memory's kernels: what they read, sizes, scratch memory and grids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prism.engine.kernels.backward_scan import backward_decay_kernel, backward_scan_kernel
from prism.engine.kernels.backward_tokens import backward_queries_kernel, backward_writes_kernel
from prism.engine.kernels.configurations import Configuration, Tiling, configuration
from prism.engine.kernels.forward import forward_scan_kernel, prepare_kernel
from prism.engine.kernels.runtime import compiled, rows, tiles


@dataclass(frozen=True)
class KernelInputs:
    """What the chunk kernels read: J columns per token, contiguous, one dtype; gates in float32.

    An erase looks up `erase_key` (None: column 0's own key) and feeds column 0 with `strength` (None: 1).
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


@dataclass(frozen=True)
class ChunkTables:
    """What the prepare kernel computes from the inputs alone. `padded` is T rounded up to whole chunks."""

    cumulated: Tensor | None  # G, [B, H, padded]
    strengths: Tensor | None  # β, [B, H, padded]
    grams: Tensor  # [B, H, padded / step, J or 2J, step, step]
    inverse: Tensor | None  # T⁻¹, [B, H, padded / step, step, step]
    maps: Tensor | None = None  # by what each segment multiplies its incoming state, [segments, B, H, K, K]


class Launch:
    """The arguments that the kernels share, and one method a kernel."""

    def __init__(self, u: KernelInputs) -> None:
        self.u = u
        self.how = u.configuration
        self.B, self.T, self.H, self.K = u.q.shape
        self.J, self.V = u.w.shape[3:]
        self.step, self.chunk = self.how.step, self.how.chunk
        self.chunks = -(-self.T // self.chunk)
        self.padded = self.chunks * self.chunk
        self.heads = self.B * self.H
        self.sizes = (self.T, self.H, self.padded)
        known = (
            u.erases,
            u.erase_key is None,
            u.strength is not None,
            u.log_decay is not None,
            u.documents is not None,
        )
        self.compiled = compiled(self.K, self.V, self.J, u.w.dtype, u.w.device, *known, self.how)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.u.w.new_empty(shape, dtype=dtype)

    def start(self, kernel: Any, how: Tiling, count: int, *arguments: Any, **constants: Any) -> None:
        """`count` programs; `constants` are those that a kernel does not share with the others."""
        self.compiled.program(kernel, how, constants).start(count, *arguments)

    def prepare(self) -> ChunkTables:
        u, C, K = self.u, self.step, self.K
        B, H, steps = self.B, self.H, self.padded // self.step
        exact = torch.float64 if u.w.dtype == torch.float32 else torch.float32
        G = None if u.log_decay is None else self.empty(B, H, self.padded, dtype=exact)
        beta = None if u.strength is None else self.empty(B, H, self.padded, dtype=torch.float32)
        grams = self.empty(B, H, steps, 2 * self.J if u.erases else self.J, C, C)
        inverse = self.empty(B, H, steps, C, C) if u.erases else None
        self.start(
            prepare_kernel, Tiling(K, self.how.prepare_warps, 3), self.heads * steps,
            rows(u.q, C, K), rows(u.x, C, K), rows(u.erase_key, C, K), u.log_decay, u.strength, u.documents, G, beta,
            tiles(grams, C, C), tiles(inverse, C, C), *self.sizes, C=C,
        )  # fmt: skip
        return ChunkTables(G, beta, grams, inverse)

    def scan(
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
        """The state after each segment, `[segments, B, H, K, V]`, or its map `[…, K, K]`. Fills o, states and fed."""
        u, how, C, K = self.u, self.how.scan, self.step, self.K
        V = K if as_map else self.V
        block = min(how.block, V)
        final = self.empty(segments, self.B, self.H, K, V, dtype=torch.float32)
        self.start(
            forward_scan_kernel, how, V // block * segments * self.heads,
            rows(u.q, C, K), rows(u.x, C, K), rows(u.w, C, block), rows(u.erase_key, C, K),
            tables.strengths, tables.cumulated, u.documents, tiles(tables.grams, C, C), tiles(tables.inverse, C, C),
            tiles(initial, K, block), rows(o, C, block), tiles(states, block, K), rows(fed, C, block),
            tiles(final, K, block), *self.sizes, self.per_segment(segments), segments,
            V=V, BV=block, C=C, INITIAL=initial is not None, MAP=as_map, READ=o is not None,
            SAVED=0 if states is None else self.chunk // C,
        )  # fmt: skip
        return final

    def reverse(
        self,
        tables: ChunkTables,
        d_o: Tensor,
        d_final: Tensor | None,
        segments: int,
        d_states: Tensor | None = None,
        d_w: Tensor | None = None,
    ) -> Tensor:
        """The gradient of the state before each segment. Fills d_states and column 0 of d_w."""
        u, how, C, K, V = self.u, self.how.reverse, self.step, self.K, self.V
        block = min(how.block, V)
        d_initial = self.empty(segments, self.B, self.H, K, V, dtype=torch.float32)
        self.start(
            backward_scan_kernel, how, V // block * segments * self.heads,
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
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """dQ, dX, dB, dβ, dg; the writes' gradients join the first one's in `d_w`."""
        u, C, V = self.u, self.chunk, self.V
        d_q, d_x = torch.empty_like(u.q), torch.empty_like(u.x)
        d_erase_key = None if u.erase_key is None else torch.empty_like(u.erase_key)
        BK = min(self.K, self.how.key_block)
        parts, sides = self.K // BK, 2 if u.erases else 1
        gate = (parts, self.B, self.H, self.padded)
        d_strength = d_cumulated = tails = touched = d_log_decay = None
        if u.strength is not None:
            d_strength = self.empty(parts, self.B, self.T, self.H, dtype=torch.float32)
        if u.log_decay is not None:
            d_cumulated = self.empty(sides + self.J, *gate, dtype=torch.float32)
            tails = self.empty(self.J, *gate, dtype=torch.float32)
            touched = self.empty(parts, self.B, self.H, self.chunks, dtype=torch.float32)
        gates = (tables.strengths, tables.cumulated, u.documents)
        queries, xs, d_xs, lookups = (rows(z, C, BK) for z in (u.q, u.x, d_x, u.erase_key))

        how = self.how.lookups
        BV = min(how.block, V)
        ws, fs, d_os, d_ws = (rows(z, C, BV) for z in (u.w, fed, d_o, d_w))
        d_tiles = tiles(d_states, BV, BK)
        self.start(
            backward_queries_kernel, how, sides * parts * self.chunks * self.heads,
            queries, xs, ws if fs is None else fs, ws, lookups, *gates, tiles(states, BV, BK), d_os, d_tiles, d_ws,
            rows(d_q, C, BK), d_xs, rows(d_erase_key, C, BK), d_strength, d_cumulated, touched, *self.sizes,
            V=V, BK=BK, BV=BV, C=C, STEP=self.step,
        )  # fmt: skip
        how = self.how.writes
        if how.block != self.how.lookups.block:
            BV = min(how.block, V)
            ws, fs, d_os, d_ws = (rows(z, C, BV) for z in (u.w, fed, d_o, d_w))
            d_tiles = tiles(d_states, BV, BK)
        self.start(
            backward_writes_kernel, how, parts * self.J * self.chunks * self.heads,
            queries, xs, fs, ws, lookups, *gates, d_os, d_tiles, d_ws, d_xs, d_cumulated, tails, *self.sizes,
            V=V, BK=BK, BV=BV, C=C, STEP=self.step,
        )  # fmt: skip
        if touched is not None:
            assert u.log_decay is not None
            self.touch_ends(touched, states, d_states, state, d_final)
            d_log_decay = torch.empty_like(u.log_decay)
            self.start(
                backward_decay_kernel, Tiling(C, 1), self.chunks * self.heads,
                tables.cumulated, u.documents, d_cumulated, tails, touched, d_log_decay, *self.sizes, self.heads,
                SLABS=sides + self.J, BLOCKS=parts, C=C, STEP=self.step,
            )  # fmt: skip
        if d_strength is not None:
            d_strength = d_strength[0] if parts == 1 else d_strength.sum(0)
        return d_q, d_x, d_erase_key, d_strength, d_log_decay

    def touch_ends(
        self, touched: Tensor, states: Tensor, d_states: Tensor, state: Tensor | None, d_final: Tensor | None
    ) -> None:
        """⟨dS', S⟩ of the first and the last chunk, from the state and its gradient as they were given: in a short sequence
        that is most of the gates' gradient, and rounding S and dS' would be most of its error."""
        last = self.chunks - 1
        ends = {n for n, given in ((0, state), (last, d_final)) if given is not None}
        for n in ends:
            S = state.mT if n == 0 and state is not None else states[:, :, n].float()
            dS = d_final.mT if n == last and d_final is not None else d_states[:, :, n].float()
            touched[1:, :, :, n] = 0.0
            touched[0, :, :, n] = (S * dS).sum((-1, -2))

    def per_segment(self, segments: int) -> int:
        """Steps in a segment: whole chunks, so that saved states are those at chunks' borders."""
        return -(-self.chunks // segments) * (self.chunk // self.step)
