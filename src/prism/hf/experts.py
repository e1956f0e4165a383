"""Mixtures of experts of many tokens on a CPU, from the weights of their modules (see linear_maps.py).

Experts are MLPs, each of the tokens that chose it: tokens are sorted by expert, and of a few tokens each goes straight to its
experts. Qwen's blocks add a shared expert, of all tokens, behind a gate of one number a token. It is added to what the others
give in one pass, and the gate's part of the gradient of the tokens inside the MLP's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.hf.linear_maps import (
    FEW,
    Forward,
    is_linear,
    is_plain,
    is_silu,
    mlp_weights,
    serves,
    swiglu_back,
    swiglu_of_experts,
    swiglu_spans,
    untouched,
)
from prism.hf.norms import spans

_FEW_PAIRS = 16
"""Tokens times experts of each, up to which sorting costs more than it gains."""


def block(original: Forward) -> Forward:
    """Make the `forward` of a block with the router `gate`, `experts`, `shared_expert` and `shared_expert_gate`."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        shared, gate = self.shared_expert, self.shared_expert_gate
        if not serves(hidden_states) or not is_linear(gate) or not is_plain(shared):
            return original(self, hidden_states)
        if (weights := mlp_weights(shared)) is None:
            return original(self, hidden_states)
        x = hidden_states.view(-1, hidden_states.shape[-1])
        _, shares, chosen = self.gate(x)
        routed = self.experts(x, chosen, shares)
        both, down = torch.cat(weights[:2]), weights[2]
        if torch.is_grad_enabled():
            return _Shared.apply(x, routed, gate.weight, both, down).view_as(hidden_states)
        return _shared(x, routed, gate.weight, both, down, keep=False)[0].view_as(hidden_states)

    return forward


def _shared(
    x: Tensor, routed: Tensor, gate: Tensor, both: Tensor, down: Tensor, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    """routed + σ(gate(x)) ⊙ MLP(x) `[n, K]`, and with `keep` what the gradient needs."""
    y, kept = swiglu_spans(x, [len(x)], both.unsqueeze(0), down.unsqueeze(0), keep)
    opened = torch.mv(x, gate[0]).sigmoid_()
    return torch.addcmul(routed, y, opened.unsqueeze(-1)), [y, opened, *kept]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routed: Tensor, gate: Tensor, both: Tensor, down: Tensor) -> Tensor:
        out, kept = _shared(x, routed, gate, both, down, keep=True)
        ctx.save_for_backward(x, gate, both, down, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, both, down, y, opened, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            inputs = [z for z in (x, gate, both, down) if z.requires_grad]
            g, u = F.linear(x, both).chunk(2, -1)
            again = F.linear(x, gate).sigmoid() * F.linear(F.silu(g) * u, down)
            found = iter(torch.autograd.grad(again, inputs, d_out, create_graph=True))
            d_x, *rest = (next(found) if z.requires_grad else None for z in (x, gate, both, down))
            return d_x, d_out, *rest
        d_y, d_opened = torch.empty_like(y), torch.empty_like(opened)
        for rows in spans(y):
            torch.mul(d_out[rows], opened[rows].unsqueeze(-1), out=d_y[rows])
            torch.sum(d_out[rows] * y[rows], -1, out=d_opened[rows])
        d_logit = torch.ops.aten.sigmoid_backward(d_opened, opened)
        to_x, _, to_gate, to_both, to_down = ctx.needs_input_grad
        given = x, [len(x)], both.unsqueeze(0), down.unsqueeze(0), kept
        d_x, d_both, d_down = swiglu_back(d_y, *given, to_x, to_both, to_down)
        if d_x is not None:
            d_x.addr_(d_logit, gate[0])
        d_gate = torch.mv(x.t(), d_logit).unsqueeze(0) if to_gate else None
        return d_x, d_out, d_gate, d_both if d_both is None else d_both[0], d_down if d_down is None else d_down[0]


def experts(original: Forward) -> Forward:
    """Make the `forward` of experts with the weights `gate_up_proj` `[E, 2N, K]` and `down_proj` `[E, K, N]`."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        given = hidden_states, top_k_index, top_k_weights
        pairs = top_k_index.numel()
        few = pairs <= _FEW_PAIRS and not torch.is_grad_enabled()
        if hidden_states.ndim != 2 or not (few or pairs >= FEW * len(self.down_proj)):
            return original(self, *given)
        if not untouched(hidden_states, top_k_weights) or not _ordinary_experts(self):
            return original(self, *given)
        return (_one_by_one if few else _sorted)(*given, self.gate_up_proj, self.down_proj)

    return forward


def _ordinary_experts(module: Any) -> bool:
    ordinary = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    ordinary |= {"has_post_expert_norm": False, "_is_expert_parallel": False}
    plain = is_plain(module) and is_silu(module.act_fn)
    return plain and all(getattr(module, name, None) is value for name, value in ordinary.items())


def _one_by_one(x: Tensor, index: Tensor, weights: Tensor, both: Tensor, down: Tensor) -> Tensor:
    """A few tokens `[n, K]` through their experts `[n, k]`."""
    out = torch.zeros_like(x)
    for row, target, chosen, shares in zip(x, out, index.tolist(), weights, strict=True):
        for expert, share in zip(chosen, shares, strict=True):
            g, u = (both[expert] @ row).chunk(2)
            target.addcmul_(down[expert] @ F.silu(g).mul_(u), share)
    return out


def _sorted(x: Tensor, index: Tensor, weights: Tensor, both: Tensor, down: Tensor) -> Tensor:
    """Tokens `[n, K]` through their experts `[n, k]`, sorted by expert."""
    chosen, k = index.flatten(), index.shape[1]
    order = chosen.argsort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = _Taken.apply(x, order // k, back, k)
    y = swiglu_of_experts(rows, chosen.bincount(minlength=len(down)).tolist(), both, down)
    mixed: Tensor = _Mixed.apply(y, weights, back, order)
    return mixed


class _Taken(torch.autograd.Function):
    """Rows of x by their indices, where each is taken `count` times; in the result, in order of x, they are at `back`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, back: Tensor, count: int) -> Tensor:
        ctx.count = count
        ctx.save_for_backward(back)
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        d_x = d_y.index_select(0, ctx.saved_tensors[0])
        return d_x if ctx.count == 1 else d_x.unflatten(0, (-1, ctx.count)).sum(1), None, None, None


class _Mixed(torch.autograd.Function):
    """For each token the sum of its experts' outputs, scaled: y `[n k, K]` sorted by expert, weights `[n, k]` → `[n, K]`.

    The experts' outputs of the tokens in their order are at `back` of y, and those of y in the tokens' order at `order`.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, back: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, back, order)
        scaled = y.index_select(0, back).view(*weights.shape, -1).mul_(weights.unsqueeze(-1))
        return scaled.sum(1) if weights.shape[1] > 1 else scaled.squeeze(1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        y, weights, back, order = ctx.saved_tensors
        d_rows = d_out.index_select(0, order // weights.shape[1])
        shares = weights.flatten().index_select(0, order)
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            d_shares = (d_rows * y).sum(-1)
            d_rows = d_rows * shares.unsqueeze(-1)
        else:
            d_shares = torch.empty_like(shares)
            for rows in spans(y):
                torch.sum(d_rows[rows] * y[rows], -1, out=d_shares[rows])
                d_rows[rows] *= shares[rows].unsqueeze(-1)
        return d_rows, d_shares.index_select(0, back).view_as(weights), None, None
