"""Cells that feed their outputs back into their gates (sLSTM): not linear in the state, so only sequential.

    (ĩ, f̃, z̃, õ)_t = inputs_t + R h_{t-1}                                    R mixes the cells of a head
    c_t = f c_{t-1} + i tanh(z̃)      n_t = f n_{t-1} + i      h_t = σ(õ) c_t / n_t      with i = exp(ĩ), f = σ(f̃)

Only the recurrent form exists: token t's write depends on h_{t-1} through gates, so the maps of tokens cannot be composed
before they are applied. c and n are stored times exp(-m) with m_t = max(log f + m_{t-1}, ĩ_t). h does not depend on m, so m
is a constant for the gradient. The state is `[B, 4, H, V]`: h, c, n, m.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine.inputs import check_flags, check_shape, zero_padding


@dataclass(frozen=True, eq=False)
class ScalarCells:
    """The tensors of T tokens.

    Args:
        inputs: `[B, T, 4, H, V]`, the token's part of ĩ, f̃, z̃ and õ, biases included.
        recurrent: R, `[4, H, V, V]`, from h (rows) to the four.
        reset: `[B, T]` bool, a document starts here: cells are empty.
        mask: `[B, T]` bool, False is padding: cells stay as they are, and the output is zero.
    """

    inputs: Tensor
    recurrent: Tensor
    reset: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        if self.inputs.ndim != 5 or self.inputs.shape[2] != 4 or any(size == 0 for size in self.inputs.shape):
            raise ValueError(f"inputs must be [B, T, 4, H, V], got shape {list(self.inputs.shape)}")
        H, V = self.inputs.shape[3:]
        check_shape("recurrent", self.recurrent, (4, H, V, V), "[4, H, V, V]")
        check_flags(self.reset, self.mask, self.inputs.shape[:2])

    @property
    def tokens(self) -> int:
        return self.inputs.shape[1]


def recurrent(update: ScalarCells, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns h, `[B, T, H, V]`, and the state after the last token."""
    dtype = torch.promote_types(update.inputs.dtype, torch.float32)
    B, _, _, H, V = update.inputs.shape
    inputs, R = zero_padding(update.inputs.to(dtype), update.mask), update.recurrent.to(dtype)
    cells = inputs.new_zeros(B, 4, H, V) if state is None else state.to(dtype)
    outputs = []
    for t, x in enumerate(inputs.unbind(1)):
        before = cells
        if update.reset is not None:
            before = torch.where(update.reset[:, t, None, None, None], 0.0, cells)
        new = _step(before, x, R)
        # A reset on padding is ignored.
        cells = new if update.mask is None else torch.where(update.mask[:, t, None, None, None], new, cells)
        outputs.append(cells[:, 0])
    h = zero_padding(torch.stack(outputs, 1), update.mask)
    return h.to(update.inputs.dtype), cells


def check_state(update: ScalarCells, state: Tensor | None) -> None:
    """A state must be a tensor `[B, 4, H, V]`."""
    if state is not None:
        check_shape("state", state, (update.inputs.shape[0], *update.inputs.shape[2:]), "[B, 4, H, V]")


def _step(cells: Tensor, x: Tensor, R: Tensor) -> Tensor:
    """The cells `[B, 4, H, V]` after a token x `[B, 4, H, V]`."""
    h, c, n, m = cells.unbind(1)
    i, f, z, o = (x + torch.einsum("bhv,ghvw->bghw", h, R)).unbind(1)
    kept = F.logsigmoid(f) + m
    m = torch.where(n == 0, i, torch.maximum(i, kept)).detach()  # an empty cell starts at its first input gate
    # Only an empty cell has kept > m, by any amount. It keeps c = n = 0, and 0 · inf would be NaN.
    i, f = (i - m).exp(), (kept - m).clamp(max=0.0).exp()
    c, n = f * c + i * z.tanh(), f * n + i
    return torch.stack([o.sigmoid() * c / n, c, n, m], 1)
