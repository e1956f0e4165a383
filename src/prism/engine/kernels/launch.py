"""From tensors to kernel launches: sizes, scratch memory, grids, and segments that run side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from prism.engine.kernels.chain import chain_kernel
from prism.engine.kernels.configurations import Configuration, configuration
from prism.engine.kernels.decay import decay_kernel
from prism.engine.kernels.decode import step_kernel
from prism.engine.kernels.lookups import lookups_kernel
from prism.engine.kernels.paths import padded
from prism.engine.kernels.prepare import gates_kernel, prepare_kernel
from prism.engine.kernels.reverse import reverse_kernel
from prism.engine.kernels.scan import scan_kernel
from prism.engine.kernels.solver import solve_backward_kernel, solve_kernel
from prism.engine.kernels.writes import writes_kernel


@dataclass(frozen=True)
class Columns:
    """What a memory is told, as the kernels read it: J columns a token, contiguous, one dtype; gates in float32.

    An erase looks up `erase_key`, or column 0's own key if that is None, and feeds column 0 with `strength` (None: 1).
    K and V are powers of two ≥ 16.
    """

    q: Tensor  # [B, T, H, K]
    x: Tensor  # [B, T, H, J, K]
    w: Tensor  # [B, T, H, J, V]
    log_decay: Tensor | None  # [B, T, H]
    erase_key: Tensor | None  # [B, T, H, K]
    strength: Tensor | None  # [B, T, H]
    documents: Tensor | None  # [B, T] int32, numbered from 0 (the one the state belongs to)

    @property
    def erases(self) -> bool:
        return self.strength is not None or self.erase_key is not None

    @property
    def configuration(self) -> Configuration:
        return configuration(self.q.shape[3], self.w.shape[4], self.w.shape[3], self.w.dtype, self.w.device)


@dataclass(frozen=True)
class Prepared:
    """What depends on the inputs alone. `padded` is T in whole chunks."""

    cumulated: Tensor | None  # G, [B, H, padded]
    strengths: Tensor | None  # β, [B, H, padded]
    grams: Tensor  # [B, H, padded / step, J or 2J, step, step]
    inverse: Tensor | None  # T⁻¹, [B, H, padded / step, step, step]


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
        self.sizes: dict[str, Any] = {"T": self.T, "H": self.H, "padded": self.padded}
        self.flags: dict[str, Any] = {
            "J": self.J,
            "K": self.K,
            "ERASE": u.erases,
            "TIED": u.erase_key is None,
            "STRENGTH": u.strength is not None,
            "DECAY": u.log_decay is not None,
            "DOCUMENTS": u.documents is not None,
            # Half precision products run on tensor cores whatever this says; it rules the few that are float32.
            "PRECISION": "ieee" if u.w.dtype == torch.float32 else "tf32",
        }

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.u.w.new_empty(shape, dtype=self.u.w.dtype if dtype is None else dtype)

    def prepare(self) -> Prepared:
        u, C = self.u, self.step
        B, H, steps = self.B, self.H, self.padded // self.step
        exact = torch.float64 if u.w.dtype == torch.float32 else torch.float32
        G = None if u.log_decay is None else self.empty(B, H, self.padded, dtype=exact)
        beta = None if u.strength is None else self.empty(B, H, self.padded, dtype=torch.float32)
        if G is not None or beta is not None:
            gates_kernel[(self.heads * steps,)](
                u.log_decay, u.strength, G, beta, **self.sizes,
                C=C, DECAY=G is not None, STRENGTH=beta is not None, num_warps=1,
            )  # fmt: skip
        grams = self.empty(B, H, steps, 2 * self.J if u.erases else self.J, C, C)
        inverse = self.empty(B, H, steps, C, C) if u.erases else None
        prepare_kernel[(self.heads * steps,)](
            _rows(u.q, C, self.K), _rows(u.x, C, self.K), _rows(u.erase_key, C, self.K), beta, G, u.documents,
            _tiles(grams, C, C), _tiles(inverse, C, C),
            **self.sizes, **self.flags, C=C, num_warps=self.how.prepare_warps,
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
        scan_kernel[(V // block * segments * self.heads,)](
            _rows(u.q, C, K), _rows(u.x, C, K), _rows(u.w, C, block), _rows(u.erase_key, C, K),
            ready.strengths, ready.cumulated, u.documents, _tiles(ready.grams, C, C), _tiles(ready.inverse, C, C),
            _tiles(initial, K, block), _rows(o, C, block), _tiles(states, block, K), _rows(fed, C, block),
            _tiles(final, K, block),
            **self.sizes, **self.split(segments), **self.flags, V=V, BV=block, C=C,
            INITIAL=initial is not None, MAP=as_map, READ=o is not None,
            SAVED=0 if states is None else self.chunk // C, num_warps=how.warps, num_stages=how.stages,
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
        reverse_kernel[(V // block * segments * self.heads,)](
            _rows(u.q, C, K), _rows(u.x, C, K), _rows(u.erase_key, C, K),
            ready.strengths, ready.cumulated, u.documents, _tiles(ready.grams, C, C), _tiles(ready.inverse, C, C),
            _rows(d_o, C, block), _tiles(d_final, K, block), _tiles(d_states, block, K), _rows(d_w, C, block),
            _tiles(d_initial, K, block),
            **self.sizes, **self.split(segments), **self.flags, V=V, BV=block, C=C, FINAL=d_final is not None,
            SAVED=0 if d_states is None else self.chunk // C, num_warps=how.warps, num_stages=how.stages,
        )  # fmt: skip
        return d_initial

    def tokens(
        self, ready: Prepared, states: Tensor, fed: Tensor | None, d_o: Tensor, d_states: Tensor, d_w: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """dQ, dX, dB, dβ, dg; the writes' gradients join the first one's in `d_w`."""
        u, C, V = self.u, self.chunk, self.V
        d_q, d_x = torch.empty_like(u.q), torch.empty_like(u.x)
        d_erase_key = None if u.erase_key is None else torch.empty_like(u.erase_key)
        BK = min(self.K, self.how.key_block)
        parts, sides = self.K // BK, 2 if u.erases else 1
        gate = (parts, self.B, self.H, self.padded)
        d_strength = None if u.strength is None else self.empty(*gate, dtype=torch.float32)
        d_cumulated = tails = touched = None
        if u.log_decay is not None:
            d_cumulated = self.empty(sides + self.J, *gate, dtype=torch.float32)
            tails = self.empty(self.J, *gate, dtype=torch.float32)
            touched = self.empty(parts, self.B, self.H, self.chunks, dtype=torch.float32)
        gates = (ready.strengths, ready.cumulated, u.documents)
        shared = {**self.sizes, **self.flags, "V": V, "BK": BK, "C": C, "STEP": self.step}
        queries, xs, d_xs, lookups = (_rows(z, C, BK) for z in (u.q, u.x, d_x, u.erase_key))

        how = self.how.lookups
        BV = min(how.block, V)
        ws, fs, d_os, d_ws = (_rows(z, C, BV) for z in (u.w, fed, d_o, d_w))
        d_tiles = _tiles(d_states, BV, BK)
        lookups_kernel[(sides * parts * self.chunks * self.heads,)](
            queries, xs, ws if fs is None else fs, ws, lookups, *gates, _tiles(states, BV, BK), d_os, d_tiles, d_ws,
            _rows(d_q, C, BK), d_xs, _rows(d_erase_key, C, BK), d_strength, d_cumulated, touched,
            **shared, BV=BV, num_warps=how.warps, num_stages=how.stages,
        )  # fmt: skip
        how = self.how.writes
        if how.block != self.how.lookups.block:
            BV = min(how.block, V)
            ws, fs, d_os, d_ws = (_rows(z, C, BV) for z in (u.w, fed, d_o, d_w))
            d_tiles = _tiles(d_states, BV, BK)
        for is_fed in (True, False) if u.erases else (False,):
            columns = 1 if is_fed else self.J - u.erases
            if columns:
                writes_kernel[(parts * columns * self.chunks * self.heads,)](
                    queries, xs, fs if is_fed else ws, lookups, *gates, d_os, d_tiles, d_ws, d_xs, d_cumulated, tails,
                    **shared, BV=BV, FED=is_fed, num_warps=how.warps, num_stages=how.stages,
                )  # fmt: skip
        d_log_decay = None
        if u.log_decay is not None:
            d_log_decay = torch.empty_like(u.log_decay)
            decay_kernel[(self.chunks * self.heads,)](
                ready.cumulated, u.documents, d_cumulated, tails, touched, d_log_decay, **self.sizes, heads=self.heads,
                J=self.J, SLABS=sides + self.J, BLOCKS=parts, C=C, STEP=self.step, DOCUMENTS=u.documents is not None,
                num_warps=1,
            )  # fmt: skip
        if d_strength is not None:  # [parts, B, H, padded] -> [B, T, H]
            whole = d_strength[0] if parts == 1 else d_strength.sum(0)
            d_strength = whole[..., : self.T].transpose(1, 2).contiguous()
        return d_q, d_x, d_erase_key, d_strength, d_log_decay

    # Segments side by side: each one's map and its state from nothing, then the short chain between segments.

    @property
    def segments(self) -> int:
        """As many as keep every multiprocessor busy with two programs, and none shorter than 8 chunks."""
        if self.how.segments is not None:
            return min(self.how.segments, self.chunks)
        if self.u.w.device.type != "cuda":
            return 1
        wanted = 2 * torch.cuda.get_device_properties(self.u.w.device).multi_processor_count
        programs = self.heads * (self.V // min(self.how.scan.block, self.V))
        return max(1, min(wanted // programs, self.chunks // 8))

    def split(self, segments: int) -> dict[str, int]:
        """Steps in a segment: whole chunks, so that saved states are those at chunks' borders."""
        return {"per_segment": -(-self.chunks // segments) * (self.chunk // self.step), "segments": segments}

    def incoming(self, ready: Prepared, initial: Tensor | None, segments: int) -> Tensor | None:
        """The state that enters each segment, `[segments, B, H, K, V]`."""
        if segments == 1:
            return initial
        maps = self.scan(ready, None, segments, as_map=True)
        return self.chain(maps, self.scan(ready, None, segments), initial, backward=False)

    def outgoing(self, ready: Prepared, d_o: Tensor, d_final: Tensor | None, segments: int) -> Tensor | None:
        """The gradient of the state that leaves each segment."""
        if segments == 1:
            return d_final
        maps = self.scan(ready, None, segments, as_map=True)
        return self.chain(maps, self.reverse(ready, d_o, None, segments), d_final, backward=True)

    def chain(self, maps: Tensor, added: Tensor, given: Tensor | None, backward: bool) -> Tensor:
        entering = torch.empty_like(added)
        block = min(16, self.V)
        chain_kernel[(self.V // block * self.heads,)](
            maps, added, given, entering, segments=added.shape[0], heads=self.heads, K=self.K, V=self.V, BV=block,
            BACKWARD=backward, GIVEN=given is not None, PRECISION=self.flags["PRECISION"],
        )  # fmt: skip
        return entering


def _rows(z: Tensor | None, rows: int, width: int) -> TensorDescriptor | None:
    """`[B, T, …]`, contiguous, cut into tiles of tokens × channels."""
    return None if z is None else TensorDescriptor.from_tensor(z.flatten(2), [1, rows, width])


def _tiles(z: Tensor | None, rows: int, columns: int) -> TensorDescriptor | None:
    """`[…, R, columns]`, contiguous, as one tall matrix cut into tiles."""
    return None if z is None else TensorDescriptor.from_tensor(z.view(-1, z.shape[-1]), [rows, columns])


def forward(
    u: Columns, state: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Prepared]:
    """The outputs, the final state, and for the backward: each chunk's state, Y_0 and what was prepared."""
    run = Launch(u)
    o = run.empty(run.B, run.T, run.H, run.V)
    states = run.empty(run.B, run.H, run.chunks, run.V, run.K) if save else None
    fed = torch.empty_like(o) if save and u.erases else None
    ready = run.prepare()
    segments = run.segments
    initial = run.incoming(ready, state, segments)
    final = run.scan(ready, initial, segments, o=o, states=states, fed=fed)[-1]
    return o, final, states, fed, ready


def backward(
    u: Columns, ready: Prepared, states: Tensor, fed: Tensor | None, d_o: Tensor, d_final: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """The gradients of q, x, w, log_decay, erase_key, strength and the state."""
    run = Launch(u)
    d_states, d_w = torch.empty_like(states), torch.empty_like(u.w)
    segments = run.segments
    leaving = run.outgoing(ready, d_o, d_final, segments)
    d_initial = run.reverse(ready, d_o, leaving, segments, d_states, d_w)[0]
    d_q, d_x, d_erase_key, d_strength, d_log_decay = run.tokens(ready, states, fed, d_o, d_states, d_w)
    return d_q, d_x, d_w, d_log_decay, d_erase_key, d_strength, d_initial


def step(given: list[Tensor | None], new_state: Tensor, substeps: int) -> Tensor:
    """The decode kernel on an `Update`'s tensors and a state; fills `new_state`, which may be that state."""
    q, k, w, log_decay, erase_key, erase_strength, erase_write, reset, mask, state = given
    assert q is not None and k is not None and w is not None
    (B, T, _, K), (H, L, V) = q.shape, w.shape[2:]
    groups = {
        name: 1 if z is None else z.shape[2] for name, z in {"q": q, "k": k, "b": erase_key, "a": erase_write}.items()
    }
    o = w.new_empty(B, T, H, V)
    block = min(padded(V), 32)
    step_kernel[(-(-V // block) * B * H,)](
        q, k, w, log_decay, erase_key, erase_strength, erase_write, _bytes(reset), _bytes(mask), state, new_state, o,
        T=T, H=H, **{f"{name}_groups": count for name, count in groups.items()},
        SUBSTEPS=substeps, L=L, K=K, V=V, BK=padded(K), BV=block, num_warps=4,
    )  # fmt: skip
    return o


def _bytes(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.view(torch.int8)


SOLVER_ELEMENTS = 2048
"""What one program of the solver holds: tokens × value channels."""


def solve(r: Tensor, p: Tensor | None, beta: Tensor, scale: Tensor | None, gelu: bool, nonlinear: bool) -> Tensor:
    sizes, grid, _ = _solver(r, beta)
    w = r.new_empty(*beta.shape, r.shape[-1])
    solve_kernel[grid](r, p, beta, scale, w, **sizes, GELU=gelu, NONLINEAR=nonlinear)
    return w


def solve_backward(
    d_w: Tensor, r: Tensor, p: Tensor | None, beta: Tensor, scale: Tensor | None, gelu: bool, nonlinear: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    sizes, grid, programs = _solver(r, beta)
    d_r, d_beta = torch.empty_like(r), torch.empty_like(beta)
    d_p = None if p is None else torch.empty_like(p)
    parts = None if scale is None else scale.new_empty(programs, *scale.shape, dtype=torch.float32)
    solve_backward_kernel[grid](
        r, p, beta, scale, d_w, d_r, d_p, d_beta, parts, **sizes, GELU=gelu, NONLINEAR=nonlinear
    )
    return d_r, d_p, d_beta, None if scale is None or parts is None else parts.sum(0).to(scale.dtype)


def _solver(r: Tensor, beta: Tensor) -> tuple[dict[str, int], tuple[int], int]:
    H, V, L = r.shape[-2], r.shape[-1], beta.shape[-1]
    rows, block = r.numel() // (H * V), padded(V)
    per_program = max(1, SOLVER_ELEMENTS // block)
    programs = -(-rows // per_program)
    return {"rows": rows, "H": H, "L": L, "V": V, "BV": block, "ROWS": per_program}, (programs * H,), programs
