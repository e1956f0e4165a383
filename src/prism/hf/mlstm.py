"""Replace xLSTM's mLSTM over a sequence, in transformers' own implementation (without the `xlstm` package).

    m_t = max(log f_t + m_{t-1}, i_t)        C_t = e^{log f_t + m_{t-1} - m_t} C_{t-1} + e^{i_t - m_t} k_t v_tᵀ,   n_t likewise
    h_t = C_tᵀ q_t / (max(|n_tᵀ q_t|, e^{-m_t}) + ε)        q scaled by K^-½

n is one more value column of ones. m depends on the gates alone: with F_t = Σ_{j≤t} log f_j it is
m_t = F_t + max(m_0, max_{j≤t} (i_j - F_j)), a running maximum. h does not depend on m (except through ε), so m is a
constant for the gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine import memory
from prism.hf.delta import decayed
from prism.hf.linear_maps import untouched

State = tuple[Tensor, Tensor, Tensor]


def backend(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the `forward` of transformers' mLSTM. One or two whole chunks stay with the original, which is as short."""

    @functools.wraps(original)
    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        igate: Tensor,
        fgate: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool | None = None,
        mode: str | None = None,
    ) -> Any:
        mode = mode or self.config.mode
        tokens, chunk = query.shape[2], self.config.chunk_size
        start = None
        if c_initial is not None and n_initial is not None and m_initial is not None:
            start = c_initial, n_initial, m_initial
        one = tokens == 1 and start is not None and not torch.is_grad_enabled() and untouched(query, igate, *start)
        if "with_padding" in mode or (not one and tokens in (1, chunk, 2 * chunk)):
            return original(
                self, query, key, value, igate, fgate, c_initial, n_initial, m_initial, return_last_states, mode
            )
        run = _step if one else mlstm
        h, last = run(query, key, value, igate, fgate, start, self.config.eps)
        if return_last_states is None:
            return_last_states = self.config.return_last_states
        return (h, last) if return_last_states or "inference" in mode else h

    return forward


def mlstm(
    query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor, start: State | None, eps: float
) -> tuple[Tensor, State]:
    """Run T tokens: query and key `[B, H, T, K]`, value `[B, H, T, V]`, gates `[B, H, T]`; the start is C, n and m."""
    q, k, v = (x.transpose(1, 2).float() for x in (query, key, value))
    write, log_f = igate.transpose(1, 2).float(), F.logsigmoid(fgate.transpose(1, 2).float())
    state, first = None, torch.zeros_like(write[:, 0])
    if start is not None:
        state = torch.cat([start[0], start[1].unsqueeze(-1)], -1).float()
        first = start[2].squeeze(-1).float()
    before, m = _stabiliser(write.detach(), log_f.detach(), first)
    log_decay = log_f + before - m
    log_decay = log_decay - log_decay.detach().clamp(min=0.0)  # rounding may make it positive; its slope stays 1
    w = (write - m).exp().unsqueeze(-1) * F.pad(v, (0, 1), value=1.0)
    o, end = memory(decayed(q * q.shape[-1] ** -0.5, k.unsqueeze(3), w.unsqueeze(3), log_decay), state)
    h = o[..., :-1] / (torch.maximum(o[..., -1:].abs(), (-m).exp().unsqueeze(-1)) + eps)
    return h.transpose(1, 2).to(query.dtype), (end[..., :-1], end[..., -1], m[:, -1].unsqueeze(-1))


def _step(
    q: Tensor, k: Tensor, v: Tensor, write: Tensor, fgate: Tensor, start: Any, eps: float
) -> tuple[Tensor, State]:
    """`mlstm` for one token after a state, in as few operations as there can be: each costs more than its arithmetic."""
    C, n, m = start  # [B, H, K, V], [B, H, K], [B, H, 1]
    log_f = F.logsigmoid(fgate).add_(m)
    m = torch.maximum(log_f, write)
    decay, k = log_f.sub_(m).exp_(), k[:, :, 0] * (write - m).exp_()
    C, n = (C * decay.unsqueeze(-1)).addcmul_(k.unsqueeze(-1), v), (n * decay).add_(k)
    q = q * q.shape[-1] ** -0.5
    size = (q @ n.unsqueeze(-1)).abs_()
    return (q @ C).div_(torch.maximum(size, (-m).exp_().unsqueeze(-1)).add_(eps)), (C, n, m)


def _stabiliser(write: Tensor, log_f: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """m_{t-1} and m_t, `[B, T, H]`."""
    total = log_f.double().cumsum(1)
    highest = torch.cummax(write.double() - total, 1).values
    m = (total + torch.maximum(highest, first.double().unsqueeze(1))).to(write.dtype)
    return torch.cat([first.unsqueeze(1), m[:, :-1]], 1), m
