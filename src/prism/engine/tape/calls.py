"""Operations as calls without arguments that write into a given buffer.

`calls_of` looks the operation up in `SERVED`. Numpy computes on the memory of the tensors: for a few hundred numbers its
overhead is a third of torch's. Matrix products are torch's, which keeps to `torch.set_num_threads`. Any other operation is
torch's with `out=`, or computed and copied.

Every function here takes the output buffer, then the operation's arguments, and returns the calls; None if it does not serve
these arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prism.engine.tape.record import Entry, tensors_in

Call = Callable[[], Any]
Server = Callable[..., "list[Call] | None"]
FLOATS = (torch.float32, torch.float64)
SHARED = (*FLOATS, torch.int64, torch.int32, torch.bool)
"""The dtypes that numpy computes as torch does."""
FEW = 256
"""Numbers up to which a slow function of numpy is faster than one of torch with its overhead."""


def array(x: Any, like: Tensor) -> Any:
    """A tensor of `like`'s dtype as numpy's view of it, or a number as an array; None if numpy would compute differently."""
    if isinstance(x, Tensor):
        same = x.dtype == like.dtype and x.dtype in SHARED
        return x.detach().numpy() if same else None
    if isinstance(x, bool) or not isinstance(x, (int, float)) or like.dtype not in SHARED:
        return None
    return np.array(x, dtype=like.detach().numpy().dtype) if like.is_floating_point() or isinstance(x, int) else None


def arrays(out: Tensor, *given: Any) -> list[Any] | None:
    """`array` of each, and of the output last; None if one has none."""
    found = [array(x, out) for x in (*given, out)]
    return None if any(x is None for x in found) else found


def copy(out: Tensor, source: Tensor) -> list[Call]:
    """Copy a tensor of the same number of elements, row-major, into a buffer."""
    target = out if out.shape == source.shape else out.view(source.shape)
    pair = arrays(target, source)
    if pair is None:
        return [partial(target.copy_, source)]
    given, place = flattened(*pair)
    return [partial(np.copyto, place, given)]


def flattened(*operands: Any) -> list[Any]:
    """The same elements in as few dimensions as possible, for arrays that broadcast to the shape of the last, the output.

    Numpy's fast path takes arrays of one shape, and single numbers; broadcasting takes three times as long.
    """
    shape = operands[-1].shape
    full = [x.reshape((1,) * (len(shape) - x.ndim) + x.shape) for x in operands]
    kept = [d for d, size in enumerate(shape) if size > 1]
    if not kept:  # single numbers, of which as_strided would make a copy
        return [x.reshape(()) for x in full]
    sizes, strides = [shape[d] for d in kept], [[0 if x.shape[d] == 1 else x.strides[d] for d in kept] for x in full]
    d = len(sizes) - 2
    while d >= 0:
        if all(steps[d] == steps[d + 1] * sizes[d + 1] for steps in strides):
            sizes[d : d + 2] = [sizes[d] * sizes[d + 1]]
            for steps in strides:
                del steps[d]
        d -= 1
    views = np.lib.stride_tricks.as_strided
    found = [views(x, tuple(sizes), tuple(steps)) for x, steps in zip(full, strides, strict=True)]
    single = [x.ndim > 0 and not any(x.strides) for x in found]
    return [_number(x) if one else x for x, one in zip(found, single, strict=True)]


def _number(x: Any) -> Any:
    """The one number that an array repeats, as a view without dimensions."""
    first: tuple[Any, ...] = (0,) * x.ndim + (...,)
    return x[first]


def ufunc(function: Any, operands: int) -> Server:
    """A function of numpy that works element by element."""

    def serve(out: Tensor, *given: Any, alpha: Any = 1, rounding_mode: Any = None) -> list[Call] | None:
        if len(given) != operands or alpha != 1 or rounding_mode is not None:
            return None
        found = arrays(out, *given)
        return None if found is None or out.dtype == torch.bool else [partial(function, *flattened(*found))]

    return serve


def _copied(out: Tensor, source: Tensor, *_: Any, **__: Any) -> list[Call] | None:
    return copy(out, source) if out.numel() == source.numel() else None


def _rsqrt(out: Tensor, x: Tensor) -> list[Call] | None:
    found = arrays(out, x, 1.0)
    if found is None:
        return None
    source, one, target = found
    return [partial(np.sqrt, *flattened(source, target)), partial(np.divide, *flattened(one, target, target))]


def _power(out: Tensor, x: Tensor, exponent: Any) -> list[Call] | None:
    found = arrays(out, x) if exponent == 2 else None
    return None if found is None else [partial(np.square, *flattened(*found))]


def _silu(out: Tensor, x: Tensor) -> list[Call] | None:
    found = arrays(out, x)
    if found is None:
        return None
    part = torch.empty_like(out)
    product = partial(np.multiply, *flattened(found[0], part.numpy(), found[1]))
    return [partial(torch.sigmoid, x, out=part), product]


def _softplus(out: Tensor, x: Tensor, *options: Any) -> list[Call] | None:
    found = None if options or out.numel() > FEW else arrays(out, x, 0.0)
    return None if found is None else [partial(np.logaddexp, *flattened(*found))]


def _cat(out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> list[Call] | None:
    parts = [part for part in parts if part.numel()]
    if any(part.ndim != out.ndim for part in parts):
        return None
    places = out.split([part.shape[dim] for part in parts], dim)
    return [call for place, part in zip(places, parts, strict=True) for call in copy(place, part)]


def _stack(out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> list[Call] | None:
    return [call for place, part in zip(out.unbind(dim), parts, strict=True) for call in copy(place, part)]


def _sum(out: Tensor, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> list[Call] | None:
    found = arrays(out, x) if dtype is None and dim and out.dtype in FLOATS else None
    return None if found is None else [partial(np.add.reduce, found[0], tuple(dim), None, found[1], keepdim)]


def squares(source: Any, target: Any) -> Call:
    """Σx² over the last dimension."""
    if hasattr(np, "vecdot"):  # from numpy 2.0 on
        return partial(np.vecdot, source, source, target)
    return partial(np.einsum, "...i,...i->...", source, source, out=target)


def _sum_of_squares(out: Tensor, x: Tensor, keepdim: bool) -> list[Call] | None:
    """Σx² over the last dimension, from `rewrite.py`."""
    found = arrays(out, x) if out.dtype in FLOATS else None
    return None if found is None else [squares(found[0], found[1][..., 0] if keepdim else found[1])]


def _rms_norm(out: Tensor, x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> list[Call] | None:
    """√D · x / sqrt(Σx² + D · eps) · weight."""
    width = x.shape[-1]
    found = arrays(out, x) if out.dtype in FLOATS and list(shape) == [width] else None
    if found is None or (weight is not None and weight.dtype != x.dtype):
        return None
    source, target = found
    added = width * (torch.finfo(x.dtype).eps if eps is None else eps)
    scale = np.full(width, width**0.5, source.dtype)
    if weight is not None:
        scale *= weight.detach().numpy()
    if source.size == width:
        return [
            partial(_norm_of_one_row, source.reshape(-1), scale, added, np.empty((), source.dtype), target.reshape(-1))
        ]
    total = np.empty((*source.shape[:-1], 1), source.dtype)
    whole = np.broadcast_to(scale, target.shape).copy()
    return [
        squares(source, total[..., 0]),
        partial(np.add, *flattened(total, np.array(added, total.dtype), total)),
        partial(np.sqrt, *flattened(total, total)),
        partial(np.divide, *flattened(source, total, target)),
        partial(np.multiply, *flattened(target, whole, target)),
    ]


def _norm_of_one_row(x: Any, scale: Any, added: float, factor: Any, out: Any) -> None:
    """For one row a number of Python is faster than an array of one number."""
    factor[()] = (float(np.dot(x, x)) + added) ** -0.5
    np.multiply(x, factor, out)
    np.multiply(out, scale, out)


def _matmul(out: Tensor, a: Tensor, b: Tensor) -> list[Call] | None:
    if a.ndim < 3 or a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2] or not a.is_floating_point():
        return None
    left, first = _one_batch(a)
    right, second = _one_batch(b)
    return [*first, *second, partial(torch.bmm, left, right, out=_one_batch(out)[0])]


def _add_product(out: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> list[Call] | None:
    """x + scale · a b for batches of matrices, from `rewrite.py`."""
    parts = [_one_batch(z) for z in (x, a, b)]
    copies = [call for _, calls in parts for call in calls]
    return [*copies, partial(torch.baddbmm, *(z for z, _ in parts), alpha=scale, out=_one_batch(out)[0])]


def _one_batch(x: Tensor) -> tuple[Tensor, list[Call]]:
    """x `[…, M, N]` as `[batch, M, N]`: a view, or a buffer and the calls that copy x into it."""
    try:
        return x.view(-1, *x.shape[-2:]), []
    except RuntimeError:
        packed = torch.zeros(x.shape, dtype=x.dtype)
        return packed.view(-1, *x.shape[-2:]), copy(packed, x)


def _embedding(out: Tensor, weight: Tensor, tokens: Tensor, *_: Any, **__: Any) -> list[Call] | None:
    return [partial(torch.index_select, weight.detach(), 0, tokens.view(-1), out=out.view(-1, weight.shape[1]))]


SERVED: dict[str, Server] = {
    "add.Tensor": ufunc(np.add, 2),
    "sub.Tensor": ufunc(np.subtract, 2),
    "mul.Tensor": ufunc(np.multiply, 2),
    "div.Tensor": ufunc(np.divide, 2),
    "neg.default": ufunc(np.negative, 1),
    "exp.default": ufunc(np.exp, 1),
    "sqrt.default": ufunc(np.sqrt, 1),
    "square.default": ufunc(np.square, 1),
    "rsqrt.default": _rsqrt,
    "pow.Tensor_Scalar": _power,
    "silu.default": _silu,
    "softplus.default": _softplus,
    "cat.default": _cat,
    "stack.default": _stack,
    "sum.dim_IntList": _sum,
    "sum_of_squares": _sum_of_squares,
    "rms_norm.default": _rms_norm,
    "matmul.default": _matmul,
    "add_product": _add_product,
    "embedding.default": _embedding,
    "clone.default": _copied,
    "contiguous.default": _copied,
    "reshape.default": _copied,
    "flatten.using_ints": _copied,
    "to.dtype": _copied,
    "_to_copy.default": _copied,
}


def calls_of(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> list[Call]:
    """The calls that compute an entry on these arguments into these buffers."""
    serve = SERVED.get(entry.name)
    if serve is not None and len(outputs) == 1:
        found = serve(outputs[0], *args, **kwargs)
        if found is not None:
            return found
    if len(outputs) == 1:
        written = _with_out(entry, args, kwargs, outputs[0])
        if written is not None:
            return [written]
    return [partial(_compute_and_copy, entry.call, args, kwargs, outputs)]


def _with_out(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Call | None:
    """torch's function of this name with `out=`, if it takes one without allocating another; tried once."""
    function = getattr(torch, entry.name.partition(".")[0], None)
    if function is None or not callable(function):
        return None
    trial = torch.zeros(out.shape, dtype=out.dtype)
    address = trial.data_ptr()
    try:
        function(*args, **kwargs, out=trial)
    except (TypeError, RuntimeError):
        return None
    return partial(function, *args, **kwargs, out=out) if trial.data_ptr() == address else None


def _compute_and_copy(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]
) -> None:
    for out, found in zip(outputs, tensors_in(function(*args, **kwargs)), strict=True):
        out.copy_(found)
