"""Cross-entropy of a linear map's outputs, `linear_cross_entropy`, in a few slices of rows: all logits are never in memory.

    loss = Σ_t -log softmax(W h_t + c)[y_t] + z · lse_t²,     lse_t = log Σ_v exp(W h_t + c)_v

Every loss over a vocabulary or a catalogue in this library is this one: training and validation of language models,
`PrismForCausalLM(labels=…)`, and the recommender's full softmax.

Design choices
- A slice's logits are computed once. If a gradient is wanted, the forward pass turns them into their gradient at once, adds
  it to those of hidden rows and weights, and drops them. The backward pass only multiplies by the loss's gradient.
- Exact: logits, log-sum-exp, softmax, the loss and the sum of the weights' gradient are float32 also for half-precision
  inputs (float64 for float64). On a GPU the product itself gives float32, and one kernel makes loss and gradient from it
  (engine/kernels/ops/cross_entropy.py). Only what enters a matrix product is rounded to the input's dtype, as autocast does.
- Why not a library's. `torch.nn.functional.linear_cross_entropy` (torch 2.13) computes in the same order, but older versions
  do not have it, it has no z-loss, and it leaves compiled code. Liger's needs Triton and a GPU, and takes logits in the
  input's dtype. Cut cross-entropy never writes logits at all: it computes them again in the backward pass, a third more
  products, and by default leaves out small gradients, so it is not exact.
- In compiled code it is the operator `prism::linear_cross_entropy`. There are no second derivatives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prism.engine.layer_ops import token_losses

IGNORED = -100
REDUCTIONS = ("mean", "sum")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORED,
    z_loss: float = 0.0,
    reduction: str = "mean",
    rows: int | None = None,
) -> Tensor:
    """The cross-entropy of targets under the logits hidden · weightᵀ + bias, a scalar in float32 or better.

    Args:
        hidden: `[…, D]`.
        weight: `[V, D]`.
        targets: `[…]`, 0 … V - 1, or `ignore_index` where nothing is predicted. On a GPU any other value makes the loss NaN.
        bias: `[V]`.
        z_loss: factor of lse², which keeps the logits' scale near 1 (PaLM: 1e-4).
        reduction: `"sum"`, or `"mean"` over the targets that are not ignored (NaN if there are none, as in torch).
        rows: rows per slice; by default as many as the device computes fast.
    """
    _check(hidden, weight, targets, bias, reduction)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    flat, expected = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    rows = rows_at_once(weight.shape[0], device) if rows is None else rows
    given = (flat, weight, bias, expected, dtype, ignore_index, float(z_loss), rows)
    recording = torch.is_grad_enabled()
    wants = [recording and z is not None and z.requires_grad for z in (flat, weight, bias)]
    if torch.compiler.is_compiling():
        total = torch.ops.prism.linear_cross_entropy(*given, wants)[0]
    elif any(wants):
        total = _LinearCrossEntropy.apply(*given, wants)
    else:
        total = _compute(*given, wants)[0]
    return total if reduction == "sum" else total / (expected != ignore_index).sum()


def next_token_loss(
    hidden: Tensor,
    head: nn.Linear,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    z_loss: float = 0.0,
    **_: Any,
) -> Tensor:
    """A language model's loss, by the rules of transformers' `ForCausalLMLoss`.

    Args:
        hidden: `[B, T, D]`, the input of the head.
        labels: `[B, T]`, the tokens themselves, or `shift_labels` `[B, T]`, those that follow them.
        num_items_in_batch: by which the sum is divided; None: the number of labels that are not ignored.
        z_loss: as in `linear_cross_entropy`.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    given = (hidden, head.weight, shift_labels.to(hidden.device), head.bias)
    total = linear_cross_entropy(*given, ignore_index=ignore_index, z_loss=z_loss, reduction=reduction)
    if num_items_in_batch is None:
        return total
    return total / (num_items_in_batch.to(total.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch)


def rows_at_once(outputs: int, device: str) -> int:
    """Rows per slice. On a GPU 2²⁸ logits. On a CPU as many as fit its cache, but more where those are few rows, because every
    slice also reads all weights."""
    if device != "cpu":
        return max(1, 2**28 // outputs)
    return max(1, 2**19 // outputs, min(256, 2**26 // outputs))


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"targets must be {list(hidden.shape[:-1])} like hidden's rows, got {list(targets.shape)}")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight must be [V, D] with D = {hidden.shape[-1]}, got {list(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias must be [V] = {[weight.shape[0]]}, got {list(bias.shape)}")
    if isinstance(weight, DTensor):
        raise ValueError(
            "weight is sharded over processes (a DTensor): call this inside the forward pass of the module that holds it, "
            "where FSDP has gathered it, or pass weight.full_tensor()"
        )


def _compute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    z_loss: float,
    rows: int,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum over rows, and its gradients by hidden `[M, D]`, weight and bias; empty where not wanted."""
    total, *grads = _results(hidden, weight, bias, targets, dtype, ignore_index, z_loss, rows, wants)
    exact = torch.promote_types(dtype, torch.float32)
    total.zero_()
    to_hidden, to_weight, to_bias = grads
    if wants[1]:
        to_weight = to_weight.zero_() if weight.dtype == exact else torch.zeros_like(weight, dtype=exact)
    h, w = hidden.to(dtype), weight.to(dtype)
    for start in range(0, len(h), rows):
        part = slice(start, start + rows)
        logits = _product(h[part], w.T, exact)
        if bias is not None:
            logits += bias.to(exact)
        losses, gradient = token_losses(logits, targets[part], ignore_index, z_loss, dtype if any(wants) else None)
        total += losses.sum()
        if gradient is None:
            continue
        if wants[0]:
            to_hidden[part] = _product(gradient, w, exact)
        if wants[1] and dtype == exact:
            to_weight.addmm_(gradient.T, h[part])
        elif wants[1]:
            to_weight += _product(gradient.T, h[part], exact)
        if wants[2]:
            to_bias += gradient.sum(0, dtype=exact).to(to_bias.dtype)
    return total, to_hidden, to_weight.to(weight.dtype), to_bias


def _results(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    z_loss: float,
    rows: int,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for the results of `_compute`."""
    total = hidden.new_empty((), dtype=torch.promote_types(dtype, torch.float32))
    to_hidden = hidden.new_empty(hidden.shape) if wants[0] else hidden.new_empty(0)
    to_weight = weight.new_empty(weight.shape) if wants[1] else hidden.new_empty(0)
    to_bias = bias.new_zeros(bias.shape) if bias is not None and wants[2] else hidden.new_empty(0)
    return total, to_hidden, to_weight, to_bias


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients come with the loss; the backward pass multiplies them."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        total, *grads = _compute(*given)
        ctx.wants = given[-1]
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # called with create_graph=True
            raise NotImplementedError(
                "linear_cross_entropy has no second derivatives: use torch's cross_entropy of the logits, or "
                "create_graph=False"
            )
        return _scaled(ctx, gradient)


def _scaled(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grads = [
        g * gradient.to(g.dtype) if wanted else None for g, wanted in zip(ctx.saved_tensors, ctx.wants, strict=True)
    ]
    return *grads, None, None, None, None, None, None


def _product(a: Tensor, b: Tensor, exact: torch.dtype) -> Tensor:
    """a @ b in dtype `exact`, without rounding the result to half precision where the device supports it."""
    if a.dtype == exact:
        return a @ b
    return torch.mm(a, b, out_dtype=exact) if a.is_cuda else (a @ b).to(exact)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wants = inputs[-1]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


_operator = torch.library.custom_op(
    "prism::linear_cross_entropy",
    _compute,
    mutates_args=(),
    schema=(
        "(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, ScalarType dtype, int ignore_index, float z_loss, "
        "SymInt rows, bool[] wants) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
_operator.register_fake(_results)
_operator.register_autograd(_scaled, setup_context=_setup_context)
