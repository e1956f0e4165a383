"""Cells that mix their own outputs back in (sLSTM): a recurrence that is not linear in its state, so only sequential.

    (ĩ, f̃, z̃, õ)_t = inputs_t + R h_{t-1}                                    R mixes the cells of a head
    c_t = f c_{t-1} + i tanh(z̃)      n_t = f n_{t-1} + i      h_t = σ(õ) c_t / n_t      with i = exp(ĩ), f = σ(f̃)

No form but the recurrent one exists: what token t writes depends on h_{t-1} through gates, so that maps of tokens cannot be
composed before they are applied. c and n are kept times exp(-m) with m_t = max(log f + m_{t-1}, ĩ_t), which h does not feel;
hence m is a constant for the gradient. The state is `[B, 4, H, V]`: h, c, n, m.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ScalarCells:
    """The tensors of T tokens.

    Args:
        inputs: `[B, T, 4, H, V]`, what the token adds to ĩ, f̃, z̃ and õ, biases included.
        recurrent: R, `[4, H, V, V]`, from h (rows) to the four.
        reset: `[B, T]` bool, a document starts here: cells are empty.
        mask: `[B, T]` bool, False is padding: cells stay as they are, and the output is zero.
    """

    inputs: Tensor
    recurrent: Tensor
    reset: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        if self.inputs.ndim != 5 or self.inputs.shape[2] != 4 or min(self.inputs.shape) == 0:
            raise ValueError(f"inputs must be [B, T, 4, H, V], got shape {list(self.inputs.shape)}")
        H, V = self.inputs.shape[3:]
        if tuple(self.recurrent.shape) != (4, H, V, V):
            raise ValueError(
                f"recurrent has shape {list(self.recurrent.shape)}, expected [4, H, V, V] = {[4, H, V, V]}"
            )
        for name in ("reset", "mask"):
            flag, shape = getattr(self, name), tuple(self.inputs.shape[:2])
            if flag is not None and (tuple(flag.shape) != shape or flag.dtype != torch.bool):
                raise ValueError(
                    f"{name} must be bool of shape [B, T] = {list(shape)}, got {flag.dtype} {list(flag.shape)}"
                )

    @property
    def tokens(self) -> int:
        return self.inputs.shape[1]


def recurrent(update: ScalarCells, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns h, `[B, T, H, V]`, and the state after the last token."""
    dtype = torch.promote_types(update.inputs.dtype, torch.float32)
    B, _, _, H, V = update.inputs.shape
    inputs, R = update.inputs.to(dtype), update.recurrent.to(dtype)
    if update.mask is not None:
        inputs = torch.where(update.mask[..., None, None, None], inputs, 0.0)
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
    h = torch.stack(outputs, 1)
    if update.mask is not None:
        h = torch.where(update.mask[..., None, None], h, 0.0)
    return h.to(update.inputs.dtype), cells


def check_state(update: ScalarCells, state: Tensor | None) -> None:
    expected = (update.inputs.shape[0], *update.inputs.shape[2:])
    if state is not None and (not isinstance(state, Tensor) or tuple(state.shape) != expected):
        got = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(f"state must be a tensor of shape [B, 4, H, V] = {list(expected)}, got {got}")


def _step(cells: Tensor, x: Tensor, R: Tensor) -> Tensor:
    h, c, n, m = cells.unbind(1)
    i, f, z, o = (x + torch.einsum("bhv,ghvw->bghw", h, R)).unbind(1)
    kept = F.logsigmoid(f) + m
    m = torch.where(n == 0, i, torch.maximum(i, kept)).detach()  # an empty cell starts at its first input gate
    # Only an empty cell has kept > m, by any amount: what it keeps is nothing, and nothing times infinity is no number.
    i, f = (i - m).exp(), (kept - m).clamp(max=0.0).exp()
    c, n = f * c + i * z.tanh(), f * n + i
    return torch.stack([o.sigmoid() * c / n, c, n, m], 1)
