"""Chunkwise: a mini-batch at once, in matrix products (the literature's dual form).

All gradients of a mini-batch are taken at one set of weights, so they are known at once; the weights W_i that token i
sees are never formed. Gradients enter every equation linearly, so their coefficients are computed before the gradients.
With J examples (the b tokens, preceded by c - 1 earlier ones if there is a window), incoming weights W and U, and
gradients g_j:

    U_i = inherit_i U + Σ_j accumulate_ij g_j          W_i = keep_i W - Σ_s apply_is P(U_s)

and without P, W_i = keep_i W - carry_i U - Σ_j write_ij g_j with write = apply · accumulate, carry = apply · inherit. Here
W are the weights that the last token read; for `Averaged`, the weights at the start of the mini-batch.

With example j's gradient x_{l,j} δ_{l,j}ᵀ in layer l, token i's input x̄_{l,i} gives

    z̄_{l,i} = keep_i (x̄ W_l + b_l) - carry_i (x̄ U_l + u_l) - Σ_j write_ij (x̄_{l,i}·x_{l,j} + 1) δ_{l,j}

(the 1 is the bias's). Newton-Schulz mixes the gradients: only there each W_i is formed after all.

Memory in training: each mini-batch leaves weights that the backward pass would keep. Instead, only those at the start of
every `SEGMENT` mini-batches are kept, and the rest is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prism.engine.linear.decay import HeadDecay
from prism.engine.networks.layout import Layout, align, earlier_examples, places, position_after
from prism.engine.networks.network import Network, Weights, gelu, orthogonalize, outer
from prism.engine.networks.state import Learned, NetworkState, advance, pack, restart, unpack
from prism.engine.networks.update import Averaged, InnerUpdate, Momentum

SEGMENT = 16

Step = Callable[[Learned, Any], tuple[Tensor, Learned]]


class Coefficients(NamedTuple):
    """Of the equations above; `…` stands for `N, B, H`. None is 1 for `keep`, and no incoming U for `inherit` and `carry`."""

    keep: Tensor | None  # [..., b, 1]
    inherit: Tensor | None  # [..., b, 1]
    accumulate: Tensor  # [..., b, J]
    apply: Tensor  # [..., b, b]
    carry: Tensor | None  # [..., b, 1]
    write: Tensor  # [..., b, J]


class Row(NamedTuple):
    """One mini-batch. `full`: its last slot is taken; `fresh`: a document begins with it. Each for all rows, or `[B]`."""

    q: Tensor  # [B, H, b, K]
    k: Tensor  # [B, H, J, K]
    v: Tensor  # [B, H, J, V]
    c: Coefficients  # [B, H, ·, ·], or [·, ·] for all
    full: Tensor | bool
    fresh: Tensor | bool


def chunkwise(update: InnerUpdate, state: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs `[B, T, H, V]` and the state after the last token."""
    u = update.prepared()
    incoming = unpack(u, state)
    layout = align(u.tokens, u.mini_batch, incoming.position, u.reset, u.mask, u.q)
    q, k, v, rate = (layout.to_chunks(x) for x in (u.q, u.k, u.v, u.rate))
    window: tuple[Tensor, ...] = ()
    if incoming.window:
        before, window = earlier_examples(u, layout, incoming.window)
        k, v, rate = (torch.cat([old, new], 3) for old, new in zip(before, (k, v, rate), strict=True))
    numbers = _per_mini_batch(coefficients(u, layout, rate), layout.count)
    fresh = [False] * layout.count if layout.fresh is None else list(layout.fresh)
    full = [layout.is_full(n) for n in range(layout.count)]
    # `unbind` has one backward for all mini-batches; indexing would fill a full-size zero tensor each.
    rows = [Row(*row) for row in zip(q.unbind(), k.unbind(), v.unbind(), numbers, full, fresh, strict=True)]
    z, learned = run(partial(_mini_batch, u), incoming.learned, rows)
    place = places(u.tokens, u.mini_batch, incoming.position, u.reset, u.q)
    position = position_after(place, u.mini_batch, incoming.position, u.mask)
    o = u.finish(layout.from_chunks(u.network.answer(z, q)), update.v.dtype)
    return o, pack(u, NetworkState(learned, position, window))


def _per_mini_batch(c: Coefficients, count: int) -> list[Coefficients]:
    columns = [[x] * count if x is None or x.ndim < 5 else x.unbind() for x in c]
    return [Coefficients(*numbers) for numbers in zip(*columns, strict=True)]


def _mini_batch(u: InnerUpdate, learned: Learned, row: Row) -> tuple[Tensor, Learned]:
    """z̄_L `[B, H, b, V]`, and the weights and U after the mini-batch."""
    learned = restart(u, learned, row.fresh)
    inputs, deltas = u.network.gradient(learned.start, row.k, row.v)
    if isinstance(u.learner, Momentum) and u.learner.newton_schulz:
        return _with_newton_schulz(u, learned, row, inputs, deltas)
    z = read(u.network, learned, row.q, row.c, inputs, deltas)
    gradient: Weights | None = None
    if u.keeps_gradient:
        gradient = outer(u.network, inputs, deltas, _last(row.c.accumulate).transpose(-1, -2))
        if learned.gradient is not None and row.c.inherit is not None:
            share = _last(row.c.inherit)
            gradient = tuple(g + share * old for g, old in zip(gradient, learned.gradient, strict=True))
    if isinstance(u.learner, Averaged) and gradient is not None:
        scale = u.learner.scale[-1]
        weights = tuple(w - scale * g for w, g in zip(learned.start, gradient, strict=True))
    else:
        weights = written(u.network, learned, row.c, inputs, deltas)
    return z, advance(u, learned, weights, gradient, row.full)


def read(
    network: Network, learned: Learned, q: Tensor, c: Coefficients, inputs: list[Tensor], deltas: list[Tensor]
) -> Tensor:
    """z̄_L `[B, H, b, V]`: the answer of each token's weights W_i to its query."""
    z = q
    for layer, (x, delta) in enumerate(zip(inputs, deltas, strict=True)):
        x_read = gelu(z) if layer else z
        z = network.affine(learned.base, layer, x_read)
        if c.keep is not None:
            z = c.keep * z
        if learned.gradient is not None and c.carry is not None:
            z = z - c.carry * network.affine(learned.gradient, layer, x_read)
        products = x_read @ x.transpose(-1, -2)
        z = z - (c.write * (products if network.biases is None else products + 1)) @ delta
    return z


def written(network: Network, learned: Learned, c: Coefficients, inputs: list[Tensor], deltas: list[Tensor]) -> Weights:
    """The weights that the last token sees."""
    steps = outer(network, inputs, deltas, _last(c.write).transpose(-1, -2))
    weights = learned.base if c.keep is None else tuple(_last(c.keep) * w for w in learned.base)
    if learned.gradient is not None and c.carry is not None:
        share = _last(c.carry)
        steps = tuple(s + share * g for s, g in zip(steps, learned.gradient, strict=True))
    return tuple(w - s for w, s in zip(weights, steps, strict=True))


def _with_newton_schulz(
    u: InnerUpdate, learned: Learned, row: Row, inputs: list[Tensor], deltas: list[Tensor]
) -> tuple[Tensor, Learned]:
    """`_mini_batch` with P = Newton-Schulz: forms U_i and W_i of every token, `[B, H, b, in, out]`, layer by layer."""
    assert isinstance(u.learner, Momentum)
    c, z = row.c, row.q
    weights, gradient = [], []
    for layer, (x, delta) in enumerate(zip(inputs, deltas, strict=True)):
        U = (c.accumulate.unsqueeze(-1) * x.unsqueeze(-3)).transpose(-1, -2) @ delta.unsqueeze(-3)
        if learned.gradient is not None and c.inherit is not None:
            U = U + c.inherit.unsqueeze(-1) * learned.gradient[layer].unsqueeze(-3)
        steps = c.apply @ orthogonalize(U, u.learner.newton_schulz).flatten(-2)
        W = learned.base[layer].unsqueeze(-3)
        W = (W if c.keep is None else c.keep.unsqueeze(-1) * W) - steps.unflatten(-1, U.shape[-2:])
        z = ((gelu(z) if layer else z).unsqueeze(-2) @ W).squeeze(-2)
        weights.append(W[..., -1, :, :])
        gradient.append(U[..., -1, :, :])
    return z, advance(u, learned, tuple(weights), tuple(gradient), row.full)


def _last(x: Tensor) -> Tensor:
    """The last token's row, `[…, 1, ·]`."""
    return x[..., -1:, :]


def coefficients(u: InnerUpdate, layout: Layout, rate: Tensor) -> Coefficients:
    """The coefficients of all mini-batches; `rate` is `[N, B, H, J]`."""
    b, learner = u.mini_batch, u.learner
    eye = torch.eye(b, dtype=rate.dtype, device=rate.device)
    if isinstance(learner, Averaged):
        sums = eye.new_ones(b, b).tril() * rate.unsqueeze(-2)
        scale = learner.scale.unsqueeze(-1)
        return Coefficients(None, eye.new_ones(b, 1), sums, eye * scale, scale, scale * sums)

    left, inherit = _products(layout, learner.log_momentum)
    if u.window == 1:
        seen = eye if left is None else left
    else:
        seen = _window(u, layout) if left is None else left @ _window(u, layout)
    accumulate = seen * rate.unsqueeze(-2)
    kept, keep = _products(layout, learner.log_decay)
    apply = eye.new_ones(b, b).tril() if kept is None else kept
    # Empty slots take no step: their U is not zero.
    apply = apply * (_occupied(u, layout) if learner.step is None else layout.to_chunks(learner.step)).unsqueeze(-2)
    carry = None if inherit is None else apply @ inherit
    return Coefficients(keep, inherit, accumulate, apply, carry, apply @ accumulate)


def _products(layout: Layout, log: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Π_{j<m≤i} of a gate, `[…, b, b]`, and Π_{m≤i} `[…, b, 1]`; None for no gate."""
    if log is None:
        return None, None
    decay = HeadDecay(layout.to_chunks(log), None)
    one = log.new_ones((), dtype=decay.dtype)
    return decay.weights(strict=False, before=False), decay.from_start(one, before=False)


def _occupied(u: InnerUpdate, layout: Layout) -> Tensor:
    """`[N, B, 1, b]`, 1 where a slot holds a token."""
    return layout.to_chunks(u.rate.new_ones(u.batch, u.tokens, 1))


def _window(u: InnerUpdate, layout: Layout) -> Tensor:
    """`[N, B, 1, b, J]`, 1 where example j is among the c that token i uses."""
    place = torch.arange(u.mini_batch, device=u.q.device).expand(1, 1, -1)
    if layout.origin is not None:  # tokens are counted from the first one of this call
        place = place - layout.origin.unsqueeze(-1)
    earlier = torch.arange(1 - u.window, 0, device=u.q.device).expand(*place.shape[:2], -1)
    age = place.unsqueeze(-1) - torch.cat([earlier, place], -1).unsqueeze(-2)
    inside = ((age >= 0) & (age < u.window)).unsqueeze(2)
    return inside * _occupied(u, layout).unsqueeze(-1)


def run(step: Step, learned: Learned, rows: list[Any]) -> tuple[Tensor, Learned]:
    """Call `step(learned, row) -> (z, learned)` for every row; return all z, stacked, and the last `learned`."""
    outputs: list[Tensor] = []
    recompute = torch.is_grad_enabled() and len(rows) > SEGMENT
    for begin in range(0, len(rows), SEGMENT):
        segment = rows[begin : begin + SEGMENT]
        if recompute:
            z, learned = checkpoint(_segment, step, learned, segment, use_reentrant=False, preserve_rng_state=False)
        else:
            z, learned = _segment(step, learned, segment)
        outputs += z
    return torch.stack(outputs), learned


def _segment(step: Step, learned: Learned, rows: list[Any]) -> tuple[list[Tensor], Learned]:
    outputs = []
    for row in rows:
        z, learned = step(learned, row)
        outputs.append(z)
    return outputs, learned
