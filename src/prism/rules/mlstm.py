"""mLSTM, the matrix memory of xLSTM: linear attention with an exponential input gate and a normaliser.

    C_t = f_t C_{t-1} + i_t k_t v_tᵀ    n_t = f_t n_{t-1} + i_t k_t    h_t = C_tᵀq_t / max(|n_tᵀq_t|, 1)    (Beck et al., 2024)

with i = exp(ĩ), f = σ(f̃) and k scaled by K^-½. exp(ĩ) would overflow, so C and n are kept times exp(-m_t), where
m_t = max(log f_t + m_{t-1}, ĩ_t), and the 1 becomes exp(-m_t). m depends on the gates alone, so that the rest is a memory of
the normal form: it writes exp(ĩ_t - m_t) ≤ 1 and decays by exp(log f_t + m_{t-1} - m_t) ≤ 1. h does not depend on m (except
through `eps`), so m is detached: a constant for the gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import Update
from prism.rules.parts import BlockLinear, Carry, ShortConv, at_least_float32, split_heads, with_normaliser
from prism.rules.parts.norms import HeadLayerNorm
from prism.rules.rule import Objective, Paper, Rule, Span, check_integers, check_nonnegative, set_initial_weights


class Mlstm(Rule):
    """mLSTM: a matrix memory with exponential gates and a normaliser.

    Defaults as published: an inner width of twice the width, K = V = 2 · width / heads, q, k and v from blocks of 4 channels.

    q and k come from a convolved branch, v from the branch itself; the gates see all three and are initially constant.

    Args:
        expand: inner width, as a multiple of the width.
        block_size: size of the blocks of the block-diagonal maps to q, k and v.
        eps: added to the divisor of the output.
    """

    name = "mlstm"
    paper = Paper("xLSTM", "Beck et al. 2024", "https://arxiv.org/abs/2405.04517")
    objective = Objective("-⟨Sᵀk, v⟩ + decay, normalised")
    forgetting = "per head"
    transition = "scalar"
    shared_maps = ("query", "out")

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        expand: int = 2,
        block_size: int = 4,
        conv_size: int = 4,
        eps: float = 1e-6,
    ) -> None:
        check_integers(expand=expand, block_size=block_size)
        check_nonnegative(eps=eps)
        inner = expand * width
        if inner % heads or inner % block_size:
            raise ValueError(f"heads = {heads} and block_size = {block_size} must divide expand · width = {inner}")
        size = inner // heads
        super().__init__(width, heads, size, size)
        self.eps = eps
        self.state_size = heads * size * (size + 1)
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.conv = ShortConv(inner, conv_size, bias=True)
        self.query, self.key, self.value = (BlockLinear(inner, inner // block_size) for _ in range(3))
        self.input_gate = nn.Linear(3 * inner, heads)
        self.forget_gate = nn.Linear(3 * inner, heads)
        self.norm = HeadLayerNorm(heads, size, eps=1e-5, bias=False)
        self.skip = nn.Parameter(torch.empty(inner))
        set_initial_weights(self)
        self.out = nn.Linear(inner, width, bias=False)

    def initial_weights(self) -> dict[str, Tensor]:
        inner = self.heads * self.value_dim
        return {
            "input_gate.weight": torch.zeros(self.heads, 3 * inner),
            "input_gate.bias": torch.empty(self.heads).normal_(std=0.1),
            "forget_gate.weight": torch.zeros(self.heads, 3 * inner),
            "forget_gate.bias": torch.linspace(3.0, 6.0, self.heads),
            "skip": torch.ones(inner),
        }

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], tuple[Tensor, ...]]:
        branch, z = self.up(x).chunk(2, -1)
        mixed, conv_state = self.conv(branch, carry.get("conv"), span)
        qkv = self.query(mixed), self.key(mixed), self.value(branch)
        gates = torch.cat(qkv, -1)
        write, forget = (at_least_float32(gate(gates)) for gate in (self.input_gate, self.forget_gate))  # [B, T, H]
        log_f = F.logsigmoid(forget)
        before, m, last = stabiliser(log_f.detach(), write.detach(), carry.get("stabiliser"), span)
        q, k, v = (split_heads(part, self.heads) for part in qkv)
        log_decay = log_f + before - m
        log_decay = log_decay - log_decay.detach().clamp(min=0.0)  # rounding may make it positive; its slope stays 1
        # The output is divided by its last column, for which half precision is not enough.
        w = (write - m).exp().unsqueeze(-1) * with_normaliser(at_least_float32(v))
        update = Update(
            q,
            (k * self.key_dim**-0.5).unsqueeze(3),
            w.unsqueeze(3),
            log_decay,
            reset=span.reset,
            mask=span.mask,
        )
        return update, {"conv": conv_state, "stabiliser": last}, (m, mixed, z)

    def output(self, o: Tensor, x: Tensor, extra: tuple[Tensor, ...]) -> Tensor:
        m, mixed, z = extra
        divisor = torch.maximum(o[..., -1:].abs(), (-m).exp().unsqueeze(-1)) + self.eps
        h = self.norm((o[..., :-1] / divisor).to(x.dtype))
        return self.out((h + self.skip.to(x.dtype) * mixed) * F.silu(z))


def stabiliser(log_f: Tensor, write: Tensor, start: Tensor | None, span: Span) -> tuple[Tensor, Tensor, Tensor]:
    """m_{t-1} and m_t, `[B, T, H]`, and m after the last real token, `[B, H]`; a document starts from m = 0.

    m_t = max(a_t + m_{t-1}, b_t) is an associative scan: log₂ T rounds, each joining neighbours twice as far apart.
    """
    first = torch.zeros_like(write[:, 0]) if start is None else start.to(write.dtype)
    a, b = log_f, write  # of the maps m ↦ max(a + m, b), whose compositions up to each token follow
    if span.reset is not None:  # start from m = 0
        fresh = span.reset.unsqueeze(-1)
        a, b = torch.where(fresh, -torch.inf, a), torch.where(fresh, torch.maximum(log_f, write), b)
    reach = 1
    while reach < write.shape[1]:
        b = torch.cat([b[:, :reach], torch.maximum(a[:, reach:] + b[:, :-reach], b[:, reach:])], 1)
        a = torch.cat([a[:, :reach], a[:, reach:] + a[:, :-reach]], 1)
        reach *= 2
    if span.context is not None:
        maps = span.context.gather(torch.stack([a[:, -1], b[:, -1], first]))
        first = maps[0][2]
        for whole in maps[: span.context.rank]:
            first = torch.maximum(whole[0] + first, whole[1])
    m = torch.maximum(a + first.unsqueeze(1), b)
    m_with_start = torch.cat([first.unsqueeze(1), m], 1)
    before = m_with_start[:, :-1]
    if span.reset is not None:
        before = torch.where(span.reset.unsqueeze(-1), 0.0, before)
    last = span.last(m_with_start, 1)[:, 0]
    if span.context is not None:
        span.exchanged.append(last)
    return before, m, last
