"""From tensors to kernel launches: sizes, scratch memory and grids, a method a kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prism.engine.kernels.chain import chain_kernel
from prism.engine.kernels.compiled import compiled
from prism.engine.kernels.configurations import Tiling
from prism.engine.kernels.decay import decay_kernel
from prism.engine.kernels.decode import step_kernel
from prism.engine.kernels.lookups import lookups_kernel
from prism.engine.kernels.paths import padded
from prism.engine.kernels.prepare import prepare_kernel
from prism.engine.kernels.programs import rows, tiles
from prism.engine.kernels.reverse import reverse_kernel
from prism.engine.kernels.scan import scan_kernel
from prism.engine.kernels.told import Columns, Prepared
from prism.engine.kernels.writes import writes_kernel


class Launch:
    """The arguments that the kernels share, and one method a kernel."""

    def __init__(self, u: Columns) -> None:
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

    def prepare(self) -> Prepared:
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
        return Prepared(G, beta, grams, inverse)

    def scan(
        self,
        ready: Prepared,
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
            scan_kernel, how, V // block * segments * self.heads,
            rows(u.q, C, K), rows(u.x, C, K), rows(u.w, C, block), rows(u.erase_key, C, K),
            ready.strengths, ready.cumulated, u.documents, tiles(ready.grams, C, C), tiles(ready.inverse, C, C),
            tiles(initial, K, block), rows(o, C, block), tiles(states, block, K), rows(fed, C, block),
            tiles(final, K, block), *self.sizes, self.per_segment(segments), segments,
            V=V, BV=block, C=C, INITIAL=initial is not None, MAP=as_map, READ=o is not None,
            SAVED=0 if states is None else self.chunk // C,
        )  # fmt: skip
        return final

    def reverse(
        self,
        ready: Prepared,
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
            reverse_kernel, how, V // block * segments * self.heads,
            rows(u.q, C, K), rows(u.x, C, K), rows(u.erase_key, C, K),
            ready.strengths, ready.cumulated, u.documents, tiles(ready.grams, C, C), tiles(ready.inverse, C, C),
            rows(d_o, C, block), tiles(d_final, K, block), tiles(d_states, block, K), rows(d_w, C, block),
            tiles(d_initial, K, block), *self.sizes, self.per_segment(segments), segments,
            V=V, BV=block, C=C, FINAL=d_final is not None,
            SAVED=0 if d_states is None else self.chunk // C,
        )  # fmt: skip
        return d_initial

    def tokens(
        self,
        ready: Prepared,
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
        gates = (ready.strengths, ready.cumulated, u.documents)
        queries, xs, d_xs, lookups = (rows(z, C, BK) for z in (u.q, u.x, d_x, u.erase_key))

        how = self.how.lookups
        BV = min(how.block, V)
        ws, fs, d_os, d_ws = (rows(z, C, BV) for z in (u.w, fed, d_o, d_w))
        d_tiles = tiles(d_states, BV, BK)
        self.start(
            lookups_kernel, how, sides * parts * self.chunks * self.heads,
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
            writes_kernel, how, parts * self.J * self.chunks * self.heads,
            queries, xs, fs, ws, lookups, *gates, d_os, d_tiles, d_ws, d_xs, d_cumulated, tails, *self.sizes,
            V=V, BK=BK, BV=BV, C=C, STEP=self.step,
        )  # fmt: skip
        if touched is not None:
            assert u.log_decay is not None
            self.touch_ends(touched, states, d_states, state, d_final)
            d_log_decay = torch.empty_like(u.log_decay)
            self.start(
                decay_kernel, Tiling(C, 1), self.chunks * self.heads,
                ready.cumulated, u.documents, d_cumulated, tails, touched, d_log_decay, *self.sizes, self.heads,
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

    def chain(self, maps: Tensor, added: Tensor, given: Tensor | None, backward: bool) -> Tensor:
        entering = torch.empty_like(added)
        block = min(16, self.V)
        self.start(
            chain_kernel, Tiling(block, 8, 3), self.V // block * self.heads,
            maps, added, given, entering, added.shape[0], self.heads,
            V=self.V, BV=block, BACKWARD=backward, GIVEN=given is not None,
        )  # fmt: skip
        return entering


def step(given: list[Tensor | None], new_state: Tensor, substeps: int) -> Tensor:
    """The decode kernel on an `Update`'s tensors and a state; fills `new_state`, which may be that state."""
    q, k, w, log_decay, erase_key, erase_strength, erase_write, reset, mask, state = given
    assert q is not None and k is not None and w is not None
    (B, T, _, K), (H, L, V) = q.shape, w.shape[2:]
    groups = {
        name: 1 if z is None else z.shape[2] for name, z in {"q": q, "k": k, "b": erase_key, "a": erase_write}.items()
    }
    # (A contiguous tensor may have any stride where its size is 1.)
    apart = K if erase_key is None or erase_key.is_contiguous() else erase_key.stride(2)
    o = w.new_empty(B, T, H, V)
    block = min(padded(V), 32)
    step_kernel[(-(-V // block) * B * H,)](
        q, k, w, log_decay, erase_key, erase_strength, erase_write, _bytes(reset), _bytes(mask), state, new_state, o,
        T=T, H=H, **{f"{name}_groups": count for name, count in groups.items()}, b_apart=apart,
        SUBSTEPS=substeps, L=L, K=K, V=V, BK=padded(K), BV=block, num_warps=4,
    )  # fmt: skip
    return o


def _bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.view(torch.int8)
