"""Recurrences in which every number of the state goes its own way: state spaces with a diagonal, gated vector recurrences.

    h_t = a_t ⊙ h_{t-1} + x_t          o_t = h_t,  or  o_t = Re Σ_n r_t ⊙ h_t  over the last dimension

with a_t = exp(log_decay) or a_t = 1 - forget. Where a_t is no outer product (Mamba-1: exp(Δ_c A_{cn})) there is no chunk form
in matrix products; a scan remains.

Design choices
- A tensor may be given as a tuple of factors: their product is formed a chunk at a time, so that decays and writes of the
  size of the state never exist for all tokens at once. Factors that do not depend on batch or token have size 1 there.
- The scan keeps one state a chunk for the backward pass and computes the others again.
- Numbers may be complex (S4D). A state handed on is real: complex ones have real and imaginary part as a last dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prism.engine.scan import prefixes
from prism.engine.update import check_log_decay, values_may_be_read

Factors: TypeAlias = Tensor | tuple[Tensor, ...]
_FACTORED = ("write", "log_decay", "forget", "read")
CHUNK = 256


@dataclass(frozen=True, eq=False)
class Diagonal:
    """The tensors of T tokens, each broadcastable to `[B, T, *S]`; a tuple stands for the product of its tensors.

    Args:
        write: x. Its broadcast shape is `[B, T, *S]`.
        log_decay: log a, real part ≤ 0; or
        forget: 1 - a, in [0, 1].
        read: r; None gives the states themselves.
        reset: `[B, T]` bool, a document starts here: h_{t-1} counts as zero.
        mask: `[B, T]` bool, False is padding: the token is the identity and its output is zero.
    """

    write: Factors
    log_decay: Factors | None = None
    forget: Factors | None = None
    read: Factors | None = None
    reset: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(B, T, *S)`."""
        return tuple(torch.broadcast_shapes(*[x.shape for x in factors(self.write)]))

    @property
    def tokens(self) -> int:
        return self.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the state: float32 at least, complex if anything is."""
        kind = torch.float32
        for name in _FACTORED:
            for x in factors(getattr(self, name)):
                kind = torch.promote_types(kind, x.dtype)
        return kind

    @property
    def real_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype in (torch.float64, torch.complex128) else torch.float32

    def initial(self, state: Tensor | None) -> Tensor:
        """`[B, *S]`, complex if numbers are."""
        if state is None:
            return torch.zeros(self.shape[0], *self.shape[2:], dtype=self.dtype, device=factors(self.write)[0].device)
        if self.dtype.is_complex:
            return torch.view_as_complex(state.to(self.real_dtype).contiguous())
        return state.to(self.dtype)

    def answer(self, o: Tensor) -> Tensor:
        """In the precision of what was written, zero where there is padding."""
        if self.mask is not None:
            o = torch.where(self.mask.reshape(*self.mask.shape, *[1] * (o.ndim - 2)), o, 0.0)
        return o.to(factors(self.write)[0].dtype)


def factors(x: Factors | None) -> tuple[Tensor, ...]:
    return () if x is None else x if isinstance(x, tuple) else (x,)


def hand_on(h: Tensor) -> Tensor:
    """A state as others keep it: real."""
    return torch.view_as_real(h) if h.is_complex() else h


def recurrent(update: Diagonal, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition, one token after the other. Returns the outputs and the state after the last token, `[B, *S]`."""
    h = update.initial(state)
    states = []
    for a, x in zip(*[part.unbind(1) for part in _maps(update)], strict=True):
        h = a * h + x
        states.append(h)
    return update.answer(_read(update, torch.stack(states, 1))), hand_on(h)


def scan(update: Diagonal, state: Tensor | None = None, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Prefix compositions within chunks, a state from chunk to chunk: logarithmic depth inside, memory linear in T."""
    h = update.initial(state)
    outputs = []
    pieces = list(_split(update, chunk))
    for piece in pieces:
        if len(pieces) > 1 and torch.is_grad_enabled():
            o, h = checkpoint(_chunk, piece, h, use_reentrant=False, preserve_rng_state=False)
        else:
            o, h = _chunk(piece, h)
        outputs.append(o)
    return update.answer(torch.cat(outputs, 1)), hand_on(h)


def check_state(update: Diagonal, state: Tensor | None) -> None:
    if state is None:
        return
    expected = (update.shape[0], *update.shape[2:], *([2] if update.dtype.is_complex else []))
    if not isinstance(state, Tensor) or tuple(state.shape) != expected:
        got = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(f"state must be a tensor of shape {list(expected)}, got {got}")


def _chunk(update: Diagonal, h: Tensor) -> tuple[Tensor, Tensor]:
    a, x = _maps(update)
    x = torch.cat([x[:, :1] + a[:, :1] * h.unsqueeze(1), x[:, 1:]], 1)  # the first map starts from h
    # Every number is a state of its own: K = the size of S, V = 1.
    columns = (*x.shape[:2], 1, -1, 1)
    states = prefixes(a.reshape(columns), x.reshape(columns))[1].view_as(x)
    return _read(update, states), states[:, -1].clone()  # a view would keep all states alive


def _maps(u: Diagonal) -> tuple[Tensor, Tensor]:
    """a and x, both `[B, T, *S]` in full; padding is the identity, and nothing passes the start of a document."""
    shape, x = u.shape, _product(u.write).to(u.dtype)
    a = _product(u.log_decay).exp() if u.log_decay is not None else 1 - _product(factors(u.forget))
    a = a.to(u.dtype).expand(shape)
    flags = [*shape[:2], *[1] * (len(shape) - 2)]
    if u.reset is not None:
        a = torch.where(u.reset.view(flags), 0.0, a)
    if u.mask is not None:
        real = u.mask.view(flags)
        a, x = torch.where(real, a, 1.0), torch.where(real, x, 0.0)
    return a, x


def _read(u: Diagonal, states: Tensor) -> Tensor:
    return states if u.read is None else (_product(u.read) * states).sum(-1).real


def _product(x: Factors) -> Tensor:
    """At least in float32: a decay near 1 does not survive less."""
    first, *rest = (f.float() if f.dtype in (torch.bfloat16, torch.float16) else f for f in factors(x))
    for f in rest:
        first = first * f
    return first


def _split(u: Diagonal, size: int) -> Iterator[Diagonal]:
    """Pieces of `size` tokens. `split` has one backward for all of them."""
    if u.tokens <= size:
        yield u
        return
    count = -(-u.tokens // size)

    def pieces(x: Factors | None) -> list[Any]:
        if x is None:
            return [None] * count
        if isinstance(x, tuple):
            return list(zip(*[pieces(f) for f in x], strict=True))
        return [x] * count if x.shape[1] == 1 else list(x.split(size, 1))

    names = (*_FACTORED, "reset", "mask")
    for parts in zip(*[pieces(getattr(u, name)) for name in names], strict=True):
        yield replace(u, **dict(zip(names, parts, strict=True)))


def _check(u: Diagonal) -> None:
    if (u.log_decay is None) == (u.forget is None):
        raise ValueError("a Diagonal needs exactly one of log_decay and forget (1 - decay)")
    for name in _FACTORED:
        for x in factors(getattr(u, name)):
            if not isinstance(x, Tensor) or x.ndim < 3:
                got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name} must be a tensor, or a tuple of tensors, of shape [B, T, …], got {got}")
    shape = u.shape
    if min(shape) == 0:
        raise ValueError(f"write must not have empty dimensions: shape {list(shape)}")
    for name in _FACTORED[1:]:
        for x in factors(getattr(u, name)):
            if x.ndim != len(shape) or any(n not in (1, m) for n, m in zip(x.shape, shape, strict=True)):
                raise ValueError(f"{name} has shape {list(x.shape)}, expected sizes of write {list(shape)}, or 1")
    for name in ("reset", "mask"):
        flag = getattr(u, name)
        if flag is not None and (tuple(flag.shape) != shape[:2] or flag.dtype != torch.bool):
            raise ValueError(
                f"{name} must be bool of shape [B, T] = {list(shape[:2])}, got {flag.dtype} {list(flag.shape)}"
            )
    if isinstance(u.log_decay, Tensor) and values_may_be_read(u.log_decay):
        check_log_decay(u.log_decay.real, u.mask if u.log_decay.shape[:2] == shape[:2] else None)
