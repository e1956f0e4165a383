"""From tensors to kernel launches: sizes, scratch memory, grids, and segments that run side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prism.engine.kernels.configurations import Configuration, Tiling, configuration, padded
from prism.engine.kernels.prepare import cumulate_kernel, inverse_kernel
from prism.engine.kernels.reverse import reverse_kernel
from prism.engine.kernels.scan import scan_kernel
from prism.engine.kernels.tokens import tokens_kernel


@dataclass(frozen=True)
class Columns:
    """What a memory is told, as the kernels read it: J columns a token, contiguous, one dtype; gates in float32.

    An erase looks up `erase_key`, or column 0's own key if that is None, and feeds column 0 with `strength` (None: 1).
    """

    q: Tensor  # [B, T, H, K]
    x: Tensor  # [B, T, H, J, K]
    w: Tensor  # [B, T, H, J, V]
    log_decay: Tensor | None  # [B, T, H]
    erase_key: Tensor | None  # [B, T, H, K]
    strength: Tensor | None  # [B, T, H]
    documents: Tensor | None  # [B, T] int32, numbered from 0 (the one the state belongs to)
    mask: Tensor | None  # [B, T] int8

    @property
    def erases(self) -> bool:
        return self.strength is not None or self.erase_key is not None

    @property
    def configuration(self) -> Configuration:
        return configuration(self.q.shape[3], self.w.shape[4], self.w.shape[3], self.w.dtype, self.w.device)

    @property
    def chunks(self) -> int:
        return -(-self.q.shape[1] // self.configuration.chunk)


class Launch:
    """The arguments that the kernels share, and one method a kernel."""

    def __init__(self, u: Columns) -> None:
        self.u = u
        self.how = u.configuration
        self.B, self.T, self.H, self.K = u.q.shape
        self.J, self.V = u.w.shape[3:]
        self.chunks = u.chunks
        self.heads = self.B * self.H
        self.sizes: dict[str, Any] = {"T": self.T, "H": self.H, "chunks": self.chunks}
        # Half precision products run on tensor cores whatever this says; it rules the few that are float32.
        exact = u.w.dtype == torch.float32
        self.flags: dict[str, Any] = {
            "J": self.J,
            "K": self.K,
            "V": self.V,
            "C": self.how.chunk,
            "TIED": u.erase_key is None,
            "STRENGTH": u.strength is not None,
            "DECAY": u.log_decay is not None,
            "DOCUMENTS": u.documents is not None,
            "MASKED": u.mask is not None,
            "PRECISION": "ieee" if exact else "tf32",
        }

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.u.w.new_empty(shape, dtype=self.u.w.dtype if dtype is None else dtype)

    def matrices(self, segments: int, width: int) -> Tensor:
        return self.empty(segments, self.B, self.H, self.K, width, dtype=torch.float32)

    def grid(self, tiling: Tiling, width: int, segments: int) -> tuple[int]:
        return (-(-width // tiling.block) * segments * self.heads,)

    # What depends on the inputs alone.

    def cumulate(self) -> Tensor | None:
        u, C = self.u, self.how.chunk
        if u.log_decay is None:
            return None
        exact = torch.float64 if u.w.dtype == torch.float32 else torch.float32
        G = self.empty(self.B, self.H, self.chunks * C, dtype=exact)
        cumulate_kernel[(self.heads * self.chunks,)](
            u.log_decay, u.mask, G, **self.sizes, C=C, MASKED=u.mask is not None, num_warps=1
        )
        return G

    def invert(self, G: Tensor | None) -> Tensor | None:
        u, C = self.u, self.how.chunk
        if not u.erases:
            return None
        inverse = self.empty(self.B, self.H, self.chunks, C, C)
        flags = {name: value for name, value in self.flags.items() if name != "V"}
        block = min(padded(self.K), self.how.key_block)
        inverse_kernel[(self.heads * self.chunks,)](
            u.x, u.erase_key, u.strength, G, u.documents, u.mask, inverse,
            **self.sizes, **flags, BK=block, num_warps=self.how.inverse_warps,
        )  # fmt: skip
        return inverse

    # The serial passes, over all segments at once.

    def scan(
        self,
        G: Tensor | None,
        inverse: Tensor | None,
        initial: Tensor | None,
        segments: int,
        *,
        read: tuple[Tensor, ...] = (),
        as_map: bool = False,
    ) -> Tensor:
        """The state after each segment, `[segments, B, H, K, V]`, or its map `[…, K, K]`.

        `read` is (o,) or (o, states, fed): what is written on the way.
        """
        u, tiling = self.u, self.how.scan
        width = self.K if as_map else self.V
        tiling = Tiling(min(tiling.block, padded(width)), tiling.warps, tiling.stages)
        final = self.matrices(segments, width)
        o, states, fed = (*read, None, None, None)[:3]
        scan_kernel[self.grid(tiling, width, segments)](
            u.q, u.x, u.w, u.erase_key, u.strength, G, u.documents, u.mask, inverse, initial, o, states, fed, final,
            **self.sizes, **self._segments(segments), **{**self.flags, "V": width},
            BK=padded(self.K), BV=tiling.block, ERASE=u.erases, INITIAL=initial is not None, MAP=as_map,
            READ=o is not None, SAVE=states is not None, num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
        return final

    def reverse(
        self,
        G: Tensor | None,
        inverse: Tensor | None,
        d_o: Tensor,
        d_final: Tensor | None,
        segments: int,
        save: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """The gradient of the state before each segment. `save` is (d_states, d_w): what is written on the way."""
        u, tiling = self.u, self.how.reverse
        tiling = Tiling(min(tiling.block, padded(self.V)), tiling.warps, tiling.stages)
        d_initial = self.matrices(segments, self.V)
        d_states, d_w = save or (None, None)
        reverse_kernel[self.grid(tiling, self.V, segments)](
            u.q, u.x, u.erase_key, u.strength, G, u.documents, u.mask, inverse, d_o, d_final, d_states, d_w, d_initial,
            **self.sizes, **self._segments(segments), **self.flags,
            BK=padded(self.K), BV=tiling.block, ERASE=u.erases, FINAL=d_final is not None, SAVE=bool(save),
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
        return d_initial

    def tokens(
        self, G: Tensor | None, states: Tensor, fed: Tensor | None, d_o: Tensor, d_states: Tensor, d_w: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """dQ, dX, dB, dβ, dg; the writes' gradients join the first one's in `d_w`."""
        u, tiling = self.u, self.how.tokens
        block = min(padded(self.K), self.how.key_block)
        parts = -(-self.K // block)
        d_q, d_x = torch.empty_like(u.q), torch.empty_like(u.x)
        d_erase_key = None if u.erase_key is None else torch.empty_like(u.erase_key)
        gate = (parts, self.B, self.T, self.H)
        d_strength = None if u.strength is None else self.empty(*gate, dtype=torch.float32)
        d_log_decay = None if u.log_decay is None else self.empty(*gate, dtype=torch.float32)
        tokens_kernel[(parts * self.chunks * self.heads,)](
            u.q, u.x, u.w, u.erase_key, u.strength, G, u.documents, u.mask, states, fed, d_o, d_states,
            d_q, d_x, d_w, d_erase_key, d_strength, d_log_decay,
            **self.sizes, **self.flags, BK=block, BV=min(tiling.block, padded(self.V)), ERASE=u.erases,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
        return d_q, d_x, d_erase_key, _total(d_strength), _total(d_log_decay)

    # Segments side by side: each one's map and its state from nothing, then the short chain between segments.

    @property
    def segments(self) -> int:
        """As many as keep every multiprocessor busy with two programs, and none shorter than 8 chunks."""
        if self.how.segments is not None:
            return min(self.how.segments, self.chunks)
        if self.u.w.device.type != "cuda":
            return 1
        wanted = 2 * torch.cuda.get_device_properties(self.u.w.device).multi_processor_count
        programs = self.heads * -(-self.V // min(self.how.scan.block, padded(self.V)))
        return max(1, min(wanted // programs, self.chunks // 8))

    def _segments(self, segments: int) -> dict[str, int]:
        return {"per_segment": -(-self.chunks // segments), "segments": segments}

    def incoming(
        self, G: Tensor | None, inverse: Tensor | None, initial: Tensor | None, segments: int
    ) -> Tensor | None:
        """The state that enters each segment, `[segments, B, H, K, V]`."""
        if segments == 1:
            return initial
        maps, added = self.scan(G, inverse, None, segments, as_map=True), self.scan(G, inverse, None, segments)
        states = torch.zeros_like(added)
        if initial is not None:
            states[0] = initial
        for s in range(segments - 1):
            torch.baddbmm(
                added[s].flatten(0, 1), maps[s].flatten(0, 1), states[s].flatten(0, 1), out=states[s + 1].flatten(0, 1)
            )
        return states

    def outgoing(
        self, G: Tensor | None, inverse: Tensor | None, d_o: Tensor, d_final: Tensor | None, segments: int
    ) -> Tensor | None:
        """The gradient of the state that leaves each segment."""
        if segments == 1:
            return d_final
        maps, added = self.scan(G, inverse, None, segments, as_map=True), self.reverse(G, inverse, d_o, None, segments)
        grads = torch.zeros_like(added)
        if d_final is not None:
            grads[-1] = d_final
        for s in range(segments - 1, 0, -1):
            turned = maps[s].flatten(0, 1).transpose(1, 2)
            torch.baddbmm(added[s].flatten(0, 1), turned, grads[s].flatten(0, 1), out=grads[s - 1].flatten(0, 1))
        return grads


def _total(parts: Tensor | None) -> Tensor | None:
    """Partial sums over key blocks, added up in a fixed order."""
    if parts is None:
        return None
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)


def forward(
    u: Columns, state: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The outputs, the final state, and for the backward: each chunk's state, Y_0, T⁻¹ and G."""
    run = Launch(u)
    o = run.empty(run.B, run.T, run.H, run.V)
    states = run.empty(run.B, run.H, run.chunks, run.K, run.V) if save else None
    fed = run.empty(run.B, run.T, run.H, run.V) if save and u.erases else None
    G = run.cumulate()
    inverse = run.invert(G)
    segments = run.segments
    initial = run.incoming(G, inverse, state, segments)
    final = run.scan(G, inverse, initial, segments, read=(o, states, fed) if save else (o,))[-1]  # type: ignore[arg-type]
    return o, final, states, fed, inverse, G


def backward(
    u: Columns,
    d_o: Tensor,
    d_final: Tensor | None,
    states: Tensor,
    fed: Tensor | None,
    inverse: Tensor | None,
    G: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """The gradients of q, x, w, log_decay, erase_key, strength and the state."""
    run = Launch(u)
    d_states, d_w = torch.empty_like(states), torch.empty_like(u.w)
    segments = run.segments
    leaving = run.outgoing(G, inverse, d_o, d_final, segments)
    d_initial = run.reverse(G, inverse, d_o, leaving, segments, save=(d_states, d_w))[0]
    d_q, d_x, d_erase_key, d_strength, d_log_decay = run.tokens(G, states, fed, d_o, d_states, d_w)
    return d_q, d_x, d_w, d_log_decay, d_erase_key, d_strength, d_initial
