"""Launch the kernels of a memory with a decay per key channel: sizes, scratch memory and grids, pass by pass."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from prism.engine.kernels.channel_configurations import ChannelConfiguration
from prism.engine.kernels.channel_prepare import channel_prepare_kernel
from prism.engine.kernels.channel_scan import channel_backward_scan_kernel, channel_forward_scan_kernel
from prism.engine.kernels.channel_tokens import channel_tokens_kernel
from prism.engine.kernels.launch import ChunkTables, KernelInputs, Launch, TokenGradients
from prism.engine.kernels.runtime import Compiled, rows, tiles

BEFORE, UNDECAYED = 1, 2
"""Bits of an operator's `reads`: q reads before the token's decay and writes; the erase reads the undecayed state."""


class ChannelLaunch(Launch):
    """The passes of `Launch` for a decay per key channel. Scans and parallel passes share one chunk size."""

    channels: ChannelConfiguration

    def __init__(self, u: KernelInputs, reads: int) -> None:
        self.u = u
        self.configuration = self.channels = u.configuration
        self.B, self.T, self.G, self.K = u.q.shape
        self.H, self.J, self.V = u.w.shape[2:]
        self.step = self.chunk = self.channels.chunk
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
        self.compiled = compiled(
            self.K, self.V, self.J, self.H // self.G, u.w.dtype, u.w.device, *options, self.channels
        )

    def prepare(self) -> ChunkTables:
        """What depends on the inputs only, for all chunks in parallel."""
        u, C, K, N = self.u, self.chunk, self.K, self.chunks
        tiling = self.channels.prepare
        B, H, block = self.B, self.H, min(tiling.block, self.K)
        exact = torch.float64 if u.w.dtype == torch.float32 else torch.float32
        tables = ChunkTables(
            cumulated=self.empty(B, H, self.padded, K, dtype=exact),
            strengths=None,
            grams=self.empty(B, H, N, 2 * self.J if u.erases else self.J, C, C),
            inverse=self.empty(B, H, N, C, C) if u.erases else None,
            asked=self.empty(B, H, N, C, K),
            lookups=self.empty(B, H, N, C, K) if u.erases else None,
            keys=self.empty(B, H, N, self.J, C, K),
            carried=self.empty(B, H, N, K, dtype=torch.float32),
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
        tables: ChunkTables,
        initial: Tensor | None,
        segments: int,
        *,
        o: Tensor | None = None,
        states: Tensor | None = None,
        fed: Tensor | None = None,
        as_map: bool = False,
    ) -> Tensor:
        """As in `Launch`."""
        tiling, C, K = self.channels.forward_scan, self.chunk, self.K
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
        tables: ChunkTables,
        d_o: Tensor,
        d_final: Tensor | None,
        segments: int,
        d_states: Tensor | None = None,
        d_w: Tensor | None = None,
    ) -> Tensor:
        """As in `Launch`, but writes all columns of d_w."""
        tiling, C, K, V = self.channels.backward_scan, self.chunk, self.K, self.V
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
        tables: ChunkTables,
        states: Tensor,
        fed: Tensor | None,
        d_o: Tensor,
        d_states: Tensor,
        d_w: Tensor,
        state: Tensor | None,
        d_final: Tensor | None,
    ) -> TokenGradients:
        """The gradients that are parallel over chunks."""
        u, tiling, C, V = self.u, self.channels.tokens, self.chunk, self.V
        BK, BV = min(self.channels.key_block, self.K), min(tiling.block, V)
        blocks = self.K // BK
        assert u.log_decay is not None
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
        return TokenGradients(d_q, d_x, d_erase_key, d_strength, d_log_decay)

    def _ends(
        self, states: Tensor, d_states: Tensor, state: Tensor | None, d_final: Tensor | None
    ) -> Tensor | None:
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
