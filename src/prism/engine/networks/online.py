"""The serial form of a two-layer network on a GPU: one operator that torch knows (fake tensors, autograd, compile)."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from prism.engine.kernels import paths
from prism.engine.kernels.paths import home
from prism.engine.networks.state import Fast, Learned, initial, tensors
from prism.engine.networks.update import Averaged, InnerUpdate

LARGEST = 64 * 256
"""Numbers in a weight matrix: two of them are held in the registers of one multiprocessor."""
WARPS = 8
"""The fastest of 4 to 32 on an H200, forward and backward."""


def refuses(u: InnerUpdate) -> str | None:
    """Why the kernels cannot serve an update, in one clause."""
    if not paths.INSTALLED:
        return paths.NEEDED
    if u.q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device, not {u.q.device.type!r}"
    if u.state_dtype != torch.float32:
        return "computes in float32, not float64"
    if u.reset is not None:
        return "takes one document a row, without reset"
    sizes = [*u.network.weights[0].shape[1:], u.v.shape[-1]]
    if u.network.depth != 2 or any(n < 16 or n & (n - 1) for n in sizes) or sizes[0] != sizes[2]:
        return f"takes two layers of 2ⁿ ≥ 16 units, keys as long as values, not {sizes}"
    if sizes[0] * sizes[1] > LARGEST:
        return f"takes weight matrices of up to {LARGEST} numbers, not {sizes[0]}×{sizes[1]}"
    return None


def serial(u: InnerUpdate, state: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    dtype, u = u.v.dtype, u.plain()
    assert isinstance(u.learner, Averaged)
    network, start = u.network, initial(u, state).learned.start
    w1, w2, b1, b2 = start if network.biases is not None else (*start, None, None)
    scale, shift = (None, None) if network.norm is None else (p.float() for p in network.norm)
    rate = (2 * network.loss_scale) * u.learner.scale * u.rate
    target = u.v - u.k if network.residual else u.v
    tokens = u.q, u.k, target, rate
    save = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*tokens, w1, w2, b1, b2, scale, shift)
    )
    z, *end = online_mlp(*tokens, w1, w2, b1, b2, scale, shift, save)[:5]
    o = network.answer(z.transpose(1, 2), u.q.transpose(1, 2)).transpose(1, 2)
    learned = Learned(tuple(end[:2] if network.biases is None else end), None, None)
    return u.finish(o, dtype), tensors(u, Fast(learned, None, ()))


@torch.library.custom_op("prism::online_mlp", mutates_args=())
def online_mlp(
    q: Tensor,
    k: Tensor,
    target: Tensor,
    rate: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """z `[B, T, H, D]`, the last W1, W2, b1, b2 (empty if there are none), and what the backward reads."""
    from prism.engine.networks.online_kernels import forward_kernel

    made = _outputs(q, w1, w2, b1, b2, save)
    z, end1, end2, end_b1, end_b2, *saved = made
    turned = _turned(w2)
    end = torch.empty_like(turned)
    B, T, H, D = q.shape
    with home(q):
        forward_kernel[(B * H,)](
            *[x.contiguous() for x in (q, k, target, rate)], scale, shift,
            w1.contiguous(), b1, turned, b2, z, end1, end_b1, end, end_b2, *saved, T, H,
            D=D, M=w1.shape[-1], NORM=scale is not None, BIAS=b1 is not None, SAVE=save, num_warps=WARPS,
        )  # fmt: skip
    end2.copy_(end.transpose(-1, -2))
    return made


@online_mlp.register_fake
def _(q, k, target, rate, w1, w2, b1, b2, scale, shift, save):  # type: ignore[no-untyped-def]  # typed above
    return _outputs(q, w1, w2, b1, b2, save)


def _outputs(
    q: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    hidden = (*q.shape[:3], w1.shape[-1]) if save else (0,)
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        w1.new_empty(w1.shape),
        w2.new_empty(w2.shape),
        q.new_empty((0,) if b1 is None else b1.shape),
        q.new_empty((0,) if b2 is None else b2.shape),
        q.new_empty(hidden),  # z1
        q.new_empty(hidden),  # W2ᵀδ2
        q.new_empty(q.shape if save else (0,)),  # z2
        q.new_empty(hidden),  # z1 of the query
    )


@torch.library.custom_op("prism::online_mlp_backward", mutates_args=())
def online_mlp_backward(
    d_z: Tensor,
    d_w1: Tensor,
    d_w2: Tensor,
    d_b1: Tensor | None,
    d_b2: Tensor | None,
    q: Tensor,
    k: Tensor,
    target: Tensor,
    rate: Tensor,
    w1: Tensor,
    w2: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    z1: Tensor,
    back: Tensor,
    z2: Tensor,
    asked: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, target, rate, the first W1, W2, b1, b2, and of scale and shift. `w1`, `w2`: the last weights."""
    from prism.engine.networks.online_kernels import backward_kernel

    B, T, H, D = q.shape
    tokens = [x.contiguous() for x in (q, k, target, rate)]
    d_tokens = [torch.empty_like(x) for x in tokens]
    first1, first2 = d_w1.clone(memory_format=torch.contiguous_format), _turned(d_w2)
    first_b1, first_b2 = (None if x is None else x.clone() for x in (d_b1, d_b2))
    d_scale, d_shift = (None if scale is None else q.new_empty(B, H, D) for _ in range(2))
    with home(q):
        backward_kernel[(B * H,)](
            *tokens, scale, shift, w1.clone(), _turned(w2), z1, back, z2, asked, d_z.contiguous(),
            first1, first_b1, first2, first_b2, *d_tokens, d_scale, d_shift, T, H,
            D=D, M=w1.shape[-1], NORM=scale is not None, BIAS=d_b1 is not None, num_warps=WARPS,
        )  # fmt: skip
    none = q.new_empty(0)
    return (
        *d_tokens,
        first1,
        _turned(first2),
        none if first_b1 is None else first_b1,
        none.clone() if first_b2 is None else first_b2,
        none.clone() if d_scale is None else d_scale.sum(0),
        none.clone() if d_shift is None else d_shift.sum(0),
    )  # type: ignore[return-value]  # ten tensors, of which mypy cannot count the starred ones


@online_mlp_backward.register_fake
def _(d_z, d_w1, d_w2, d_b1, d_b2, q, k, target, rate, w1, w2, scale, shift, *saved):  # type: ignore[no-untyped-def]  # typed above
    wanted = (q, k, target, rate, w1, w2, d_b1, d_b2, scale, shift)
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, target, rate, _, _, b1, _, scale, shift, save = inputs
    _, w1, w2, _, _, *saved = output
    ctx.save_for_backward(q, k, target, rate, w1, w2, scale, shift, *saved)
    ctx.bias, ctx.saved = b1 is not None, save
    ctx.mark_non_differentiable(*saved)


def _differentiate(
    ctx: Any, d_z: Tensor, d_w1: Tensor, d_w2: Tensor, d_b1: Tensor, d_b2: Tensor, *_: Tensor
) -> tuple[Tensor | None, ...]:
    if not ctx.saved:
        raise RuntimeError("prism::online_mlp was called with save=False: nothing was kept for a backward")
    biases = (d_b1, d_b2) if ctx.bias else (None, None)
    *grads, b1, b2, scale, shift = online_mlp_backward(d_z, d_w1, d_w2, *biases, *ctx.saved_tensors)
    optional = [x if x.numel() else None for x in (b1, b2, scale, shift)]
    return (*grads, *optional, None)


online_mlp.register_autograd(_differentiate, setup_context=_keep)


def _turned(x: Tensor) -> Tensor:
    """A copy with the last two dimensions exchanged."""
    return x.transpose(-1, -2).clone(memory_format=torch.contiguous_format)
