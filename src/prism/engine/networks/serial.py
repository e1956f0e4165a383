"""Serial: online gradient descent (b = 1), exactly. Each token's gradient is taken at the weights the previous token left.

Tokens cannot be computed ahead, but the weights need not be formed at every token either. In a group of tokens that began
with W, the steps of the predecessors j < t enter token t through dot products,

    x W_{t-1} + b_{t-1} = x W + b - Σ_j c_j (x·x_j + 1) δ_j          δ W_{t-1}ᵀ = δ Wᵀ - Σ_j c_j (δ·δ_j) x_j

with c_j = τ r_j. So a token costs a few products with vectors, and the group one product with all its gradients. What
needs no gradient of the group (keys times W_1, the answers) is computed for all its tokens at once, as in chunkwise.py.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from prism.engine.kernels import available
from prism.engine.networks.chunkwise import Coefficients, read, run, written
from prism.engine.networks.layout import align
from prism.engine.networks.network import Network, Weights, gelu, gelu_slope
from prism.engine.networks.state import Learned, NetworkState, pack, restart, unpack
from prism.engine.networks.update import Averaged, InnerUpdate

GROUP = 16
LARGEST = 64 * 256
"""Numbers in a weight matrix: the kernel holds two matrices in the registers of one multiprocessor."""


class Group(NamedTuple):
    """G consecutive tokens. `fresh`: a document begins with them, for all rows, or `[B]`."""

    q: Tensor  # [B, H, G, K]
    k: Tensor  # [B, H, G, K]
    v: Tensor  # [B, H, G, V]
    rate: Tensor  # c, [B, H, G]
    fresh: Tensor | bool


def serial_refuses(u: InnerUpdate) -> str | None:
    """Why this form cannot serve an update, in one clause, or None."""
    if not isinstance(u.learner, Averaged):
        return "takes plain gradient steps, without momentum or decay"
    return None if u.mini_batch == 1 else f"takes one token per mini-batch: mini_batch must be 1, not {u.mini_batch}"


def serial(update: InnerUpdate, state: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs `[B, T, H, V]` and the state after the last token."""
    u = update.prepared()
    assert isinstance(u.learner, Averaged)
    incoming = unpack(u, state)
    layout = align(u.tokens, min(GROUP, u.tokens), None, u.reset, u.mask, u.q)
    q, k, v, rate = (layout.to_chunks(x) for x in (u.q, u.k, u.v, u.learner.scale * u.rate))
    fresh = [False] * layout.count if layout.fresh is None else list(layout.fresh)
    groups = [Group(*row) for row in zip(q.unbind(), k.unbind(), v.unbind(), rate.unbind(), fresh, strict=True)]
    z, learned = run(partial(_group, u), incoming.learned, groups)
    o = u.finish(layout.from_chunks(u.network.answer(z, q)), update.v.dtype)
    return o, pack(u, NetworkState(learned, None, ()))


def _group(u: InnerUpdate, learned: Learned, group: Group) -> tuple[Tensor, Learned]:
    """z̄_L `[B, H, G, V]`, and the weights after the group."""
    learned = restart(u, learned, group.fresh)
    inputs, deltas = gradients(u.network, learned.start, group.k, group.v, group.rate)
    size = group.rate.shape[-1]
    triangle = torch.ones(size, size, dtype=group.rate.dtype, device=group.rate.device).tril()
    steps = triangle * group.rate.unsqueeze(-2)
    c = Coefficients(None, None, steps, triangle, None, steps)
    z = read(u.network, learned, group.q, c, inputs, deltas)
    return z, Learned(written(u.network, learned, c, inputs, deltas), None, None)


def gradients(
    network: Network, weights: Weights, k: Tensor, v: Tensor, rate: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """x_l and δ_l as in `Network.gradient`, each token's at the weights its predecessors left. `rate` is c, `[…, G]`."""
    depth, one = network.depth, 0.0 if network.biases is None else 1.0
    # Everything of the first layer except the δ is known in advance.
    first = network.affine(weights, 0, k)
    products = (k @ k.transpose(-1, -2) + one) * rate.unsqueeze(-2)
    inputs: list[list[Tensor]] = [[] for _ in range(depth)]
    deltas: list[list[Tensor]] = [[] for _ in range(depth)]
    for t in range(k.shape[-2]):
        now, past = slice(t, t + 1), rate[..., None, :t]
        x = [torch.cat(rows, -2) for rows in inputs] if t else []
        d = [torch.cat(rows, -2) for rows in deltas] if t else []
        z = first[..., now, :]
        if t:
            z = z - products[..., now, :t] @ d[0]
        before, seen = [z], [k[..., now, :]]
        for layer in range(1, depth):
            seen.append(gelu(z))
            z = network.affine(weights, layer, seen[layer])
            if t:
                z = z - ((seen[layer] @ x[layer].transpose(-1, -2) + one) * past) @ d[layer]
            before.append(z)
        delta = network.output_gradient(z, k[..., now, :], v[..., now, :])
        for layer in reversed(range(depth)):
            inputs[layer].append(seen[layer])
            deltas[layer].append(delta)
            if layer:
                back = delta @ weights[layer].transpose(-1, -2)
                if t:
                    back = back - ((delta @ d[layer].transpose(-1, -2)) * past) @ x[layer]
                delta = back * gelu_slope(before[layer - 1])
    return [torch.cat(rows, -2) for rows in inputs], [torch.cat(rows, -2) for rows in deltas]


def kernel_refuses(u: InnerUpdate) -> str | None:
    """Why the kernel cannot serve an update, in one clause, or None."""
    if (problem := available.device_refuses(u.q)) is not None:
        return problem
    if u.state_dtype != torch.float32:
        return "computes in float32, not float64"
    if u.reset is not None:
        return "takes one document per row, without reset"
    sizes = [*u.network.weights[0].shape[1:], u.v.shape[-1]]
    if u.network.depth != 2 or any(n < 16 or n & (n - 1) for n in sizes) or sizes[0] != sizes[2]:
        return f"takes two layers of 2ⁿ ≥ 16 units, keys as long as values, not {sizes}"
    if sizes[0] * sizes[1] > LARGEST:
        return f"takes weight matrices of up to {LARGEST} numbers, not {sizes[0]}×{sizes[1]}"
    return None


def kernel_is_automatic(u: InnerUpdate) -> bool:
    """Whether the update is on a GPU, where `backend="auto"` tries the kernel. Warns once if the versions rule it out."""
    available.warn_if_unavailable(u.q)
    return u.q.is_cuda


def serial_by_kernel(u: InnerUpdate, state: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """`serial` for a network of two layers, in one kernel (kernels/serial_mlp.py)."""
    dtype, u = u.v.dtype, u.prepared()
    assert isinstance(u.learner, Averaged)
    network, start = u.network, unpack(u, state).learned.start
    w1, w2, b1, b2 = start if network.biases is not None else (*start, None, None)
    scale, shift = (None, None) if network.norm is None else (p.float() for p in network.norm)
    rate = (2 * network.loss_scale) * u.learner.scale * u.rate
    target = u.v - u.k if network.residual else u.v
    tokens = u.q, u.k, target, rate
    save = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*tokens, w1, w2, b1, b2, scale, shift)
    )
    from prism.engine.kernels.network.serial_mlp import serial_mlp

    z, *end = serial_mlp(*tokens, w1, w2, b1, b2, scale, shift, save)[:5]
    o = network.answer(z.transpose(1, 2), u.q.transpose(1, 2)).transpose(1, 2)
    learned = Learned(tuple(end[:2] if network.biases is None else end), None, None)
    return u.finish(o, dtype), pack(u, NetworkState(learned, None, ()))
