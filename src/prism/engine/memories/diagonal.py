"""Diagonal recurrences: elementwise state updates, as in diagonal state-space models and gated vector recurrences.

    h_t = a_t ⊙ h_{t-1} + x_t          o_t = h_t,  or  o_t = Re Σ_n r_t ⊙ h_t  over the last dimension

with a_t = exp(log_decay) or a_t = 1 - forget. Where a_t is no outer product (Mamba-1: exp(Δ_c A_{cn})) there is no chunk form
in matrix products; a scan remains. Where decay, write and read are the same at every token (S4D), the recurrence is a
convolution,

    o_t = Re Σ_n r_n a_n^{t+1} h_n  +  Σ_{j≤t} K_{t-j} u_j          K_l = Re Σ_n r_n a_n^l b_n

computed by FFT, padded to twice the length.

Design choices
- A tensor may be given as a tuple of factors. Their product is formed a chunk at a time, so decays and writes of the size
  of the state never exist for all tokens at once. Factors that do not depend on batch or token have size 1 there.
- The scan keeps one state per chunk for the backward pass and recomputes the others.
- Numbers may be complex (S4D). The state that is returned is real: complex numbers become a last dimension of size 2.
- In a convolution each document becomes a row, so nothing is convolved across a border. Powers of a are computed in
  float64: a phase of thousands of radians has no meaning in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prism.engine.inputs import check_flags, check_log_decay, check_shape, describe, values_may_be_read, zero_padding
from prism.engine.linear.scan import prefixes

Factors: TypeAlias = Tensor | tuple[Tensor, ...]
_FACTORED = ("write", "log_decay", "forget", "read")
CHUNK = 256


@dataclass(frozen=True, eq=False)
class Diagonal:
    """The tensors of T tokens, each broadcastable to `[B, T, *S]`. A tuple of tensors means their product.

    Args:
        write: x. Its broadcast shape is `[B, T, *S]`.
        log_decay: log a, real part ≤ 0. Exactly one of log_decay and forget is given.
        forget: 1 - a, in [0, 1].
        read: r; None: the outputs are the states.
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
        """Of the state: at least float32, complex if any input is."""
        kind = torch.float32
        for name in _FACTORED:
            for x in factors(getattr(self, name)):
                kind = torch.promote_types(kind, x.dtype)
        return kind

    @property
    def real_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype in (torch.float64, torch.complex128) else torch.float32

    def initial(self, state: Tensor | None) -> Tensor:
        """The incoming state `[B, *S]`, complex if `dtype` is; None: zeros."""
        if state is None:
            return torch.zeros(self.shape[0], *self.shape[2:], dtype=self.dtype, device=factors(self.write)[0].device)
        if self.dtype.is_complex:
            return torch.view_as_complex(state.to(self.real_dtype).contiguous())
        return state.to(self.dtype)

    def finish(self, o: Tensor) -> Tensor:
        """Outputs for the caller: zero on padding, in the dtype of `write`."""
        return zero_padding(o, self.mask).to(factors(self.write)[0].dtype)


def factors(x: Factors | None) -> tuple[Tensor, ...]:
    """The factors of x as a tuple, empty for None."""
    return () if x is None else x if isinstance(x, tuple) else (x,)


def as_real(h: Tensor) -> Tensor:
    """A state as it is returned: real, with a last dimension of size 2 if h is complex."""
    return torch.view_as_real(h) if h.is_complex() else h


def recurrent(update: Diagonal, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition, one token after the other. Returns the outputs and the state after the last token, `[B, *S]`."""
    h = update.initial(state)
    states = []
    for a, x in zip(*[part.unbind(1) for part in _maps(update)], strict=True):
        h = a * h + x
        states.append(h)
    return update.finish(_read(update, torch.stack(states, 1))), as_real(h)


def scan(update: Diagonal, state: Tensor | None = None, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Prefix compositions within chunks, chunk after chunk: logarithmic depth inside a chunk, memory linear in T."""
    h = update.initial(state)
    outputs = []
    chunks = list(_split(update, chunk))
    for part in chunks:
        if len(chunks) > 1 and torch.is_grad_enabled():
            o, h = checkpoint(_chunk, part, h, use_reentrant=False, preserve_rng_state=False)
        else:
            o, h = _chunk(part, h)
        outputs.append(o)
    return update.finish(torch.cat(outputs, 1)), as_real(h)


def check_state(update: Diagonal, state: Tensor | None) -> None:
    """A state must be a tensor `[B, *S]`, for complex numbers `[B, *S, 2]`."""
    if state is None:
        return
    shape, is_complex = (update.shape[0], *update.shape[2:]), update.dtype.is_complex
    check_shape("state", state, (*shape, 2) if is_complex else shape, "[B, *S, 2]" if is_complex else "[B, *S]")


def total_decay(update: Diagonal, chunk: int = CHUNK) -> Tensor:
    """The product of a over all tokens, `[B, *S]`: what is left of the incoming state; zero if a document starts."""
    shape = (update.shape[0], *update.shape[2:])
    if update.log_decay is None:
        left = update.initial(None) + 1
        for part in _split(update, chunk):
            left = left * checkpoint(_product_over_tokens, part, use_reentrant=False, preserve_rng_state=False)
        return left
    wide = torch.promote_types(update.dtype, torch.float64)  # a long sum
    total = torch.zeros(shape, dtype=wide, device=factors(update.write)[0].device)
    for part in _split(replace(update, reset=None), chunk):
        assert part.log_decay is not None
        g = _product(part.log_decay).to(wide).expand(part.shape)
        total = total + zero_padding(g, part.mask).sum(1)
    left = total.exp().to(update.dtype)
    if update.reset is None:
        return left
    reset = update.reset if update.mask is None else update.reset & update.mask
    return torch.where(reset.any(1).view(-1, *[1] * (len(shape) - 1)), 0.0, left)


def _product_over_tokens(update: Diagonal) -> Tensor:
    """The product of a `[B, T, *S]` over the tokens, `[B, *S]`, by pairs: exact gradients where a factor is zero."""
    a, _ = _maps(update)
    while a.shape[1] > 1:
        pairs = a.shape[1] // 2
        a = torch.cat([a[:, :pairs] * a[:, pairs : 2 * pairs], a[:, 2 * pairs :]], 1)
    return a[:, 0]


def _chunk(update: Diagonal, h: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of a chunk before `finish`, and the state after it."""
    a, x = _maps(update)
    x = torch.cat([x[:, :1] + a[:, :1] * h.unsqueeze(1), x[:, 1:]], 1)  # the first map starts from h
    # Every number is an independent state: K = the size of S, V = 1.
    columns = (*x.shape[:2], 1, -1, 1)
    states = prefixes(a.reshape(columns), x.reshape(columns))[1].view_as(x)
    return _read(update, states), states[:, -1].clone()  # a view would keep all states alive


def _maps(u: Diagonal) -> tuple[Tensor, Tensor]:
    """a and x, both `[B, T, *S]` in full; padding is the identity, and a reset sets a to zero."""
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
    """The outputs from the states `[B, T, *S]`."""
    return states if u.read is None else (_product(u.read) * states).sum(-1).real


def _product(x: Factors) -> Tensor:
    """The product of the factors, at least in float32: a decay near 1 would round to 1 in half precision."""
    first, *rest = (f.float() if f.dtype in (torch.bfloat16, torch.float16) else f for f in factors(x))
    for f in rest:
        first = first * f
    return first


def _split(u: Diagonal, size: int) -> Iterator[Diagonal]:
    """Chunks of `size` tokens. `split` has one backward for all of them."""
    if u.tokens <= size:
        yield u
        return
    count = -(-u.tokens // size)

    def parts_of(x: Factors | None) -> list[Any]:
        if x is None:
            return [None] * count
        if isinstance(x, tuple):
            return list(zip(*[parts_of(f) for f in x], strict=True))
        return [x] * count if x.shape[1] == 1 else list(x.split(size, 1))

    names = (*_FACTORED, "reset", "mask")
    for parts in zip(*[parts_of(getattr(u, name)) for name in names], strict=True):
        yield replace(u, **dict(zip(names, parts, strict=True)))


def convolution_refuses(update: Diagonal) -> str | None:
    """Why `convolution` cannot serve an update, in one clause, or None."""
    steady = update.log_decay is not None and len(update.shape) == 4 and update.read is not None
    u, *rest = factors(update.write)
    for x in (*rest, *factors(update.log_decay), *factors(update.read)):
        steady = steady and x.shape[:2] == (1, 1)
    if steady and rest and u.shape[-1] == 1 and not u.is_complex():
        return None
    return "convolves only if decay, write and read are the same at every token"


def convolution(update: Diagonal, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs `[B, T, D]` and the state after the last token, for states `[B, D, N]`."""
    documents = DocumentRows.of(update)
    u = documents.to_rows(factors(update.write)[0].squeeze(-1).to(update.real_dtype))  # [B, n, L, D]
    L = u.shape[2]
    g, b, r = (_constant(update, name) for name in ("log_decay", "write", "read"))
    powers = _powers(g, torch.arange(L + 1, device=u.device), update.dtype)  # [L + 1, D, N]
    kernel = (r * b * powers[:-1]).sum(-1).real  # [L, D]
    spectrum = torch.fft.rfft(u, 2 * L, dim=2) * torch.fft.rfft(kernel, 2 * L, dim=0)
    o = torch.fft.irfft(spectrum, 2 * L, dim=2)[:, :, :L]

    last, length = documents.last(u)  # [B, L, D] right-aligned, [B]
    h = torch.einsum("bld,ldn->bdn", last.to(update.dtype), b * powers[:-1].flip(0))
    if state is not None:
        h0 = update.initial(state)
        # Only the first document of a row continues the incoming state.
        seen = torch.einsum("bdn,ldn->bld", h0, r * powers[1:]).real
        o = torch.cat([o[:, :1] + seen.unsqueeze(1), o[:, 1:]], 1)
        h = h + documents.if_continued(_powers(g, length, update.dtype) * h0)
    return update.finish(documents.from_rows(o)), as_real(h)


@dataclass(frozen=True)
class DocumentRows:
    """Where a token `[B, T]` goes in `[B, n, L]`: n documents per sequence, L tokens in the longest.

    None: there is one document per sequence and no padding, so tokens stay in place.
    """

    document: Tensor | None
    place: Tensor | None
    real: Tensor | None
    count: int
    length: int

    @classmethod
    def of(cls, u: Diagonal) -> DocumentRows:
        B, T = u.shape[:2]
        if u.reset is None and u.mask is None:
            return cls(None, None, None, 1, T)
        device = factors(u.write)[0].device
        real = torch.ones(B, T, dtype=torch.bool, device=device) if u.mask is None else u.mask
        begins = torch.zeros_like(real) if u.reset is None else u.reset & real
        document, seen = begins.long().cumsum(1), real.long().cumsum(1)
        place = seen - 1 - torch.where(begins, seen - 1, 0).cummax(1).values
        return cls(document, place.clamp(min=0), real, int(document.max()) + 1, int(place.max().clamp(min=0)) + 1)

    def if_continued(self, h: Tensor) -> Tensor:
        """h `[B, D, N]`, zero where the last document began in this call."""
        return h if self.document is None else torch.where((self.document[:, -1] == 0)[:, None, None], h, 0.0)

    def to_rows(self, u: Tensor) -> Tensor:
        """`[B, T, D]` → `[B, n, L, D]`, zero where there is no token."""
        if self.document is None:
            return u.unsqueeze(1)
        B, _, D = u.shape
        slots = u.new_zeros(B * self.count * self.length + 1, D)  # the last one takes the padding
        return slots.index_copy(0, self._slot(B), u.flatten(0, 1))[:-1].view(B, self.count, self.length, D)

    def from_rows(self, o: Tensor) -> Tensor:
        """`[B, n, L, D]` → `[B, T, D]`, the inverse of `to_rows`."""
        if self.document is None:
            return o.squeeze(1)
        B, D = o.shape[0], o.shape[-1]
        flat = torch.cat([o.reshape(-1, D), o.new_zeros(1, D)])
        return flat[self._slot(B)].view(B, -1, D)

    def last(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The last document of each sequence, right-aligned `[B, L, D]`, and its length `[B]`."""
        B, _, L, D = u.shape
        if self.document is None or self.real is None:
            return u[:, 0], torch.full((B,), L, device=u.device)
        current = self.document[:, -1:]
        length = (self.real & (self.document == current)).sum(1)
        own = u[torch.arange(B, device=u.device), current[:, 0]]
        index = torch.arange(L, device=u.device) - (L - length)[:, None]
        moved = own.gather(1, index.clamp(min=0).unsqueeze(-1).expand(-1, -1, D))
        return torch.where((index >= 0).unsqueeze(-1), moved, 0.0), length

    def _slot(self, batch: int) -> Tensor:
        """`[B·T]`, each token's place in the flattened rows; the extra last place for padding."""
        assert self.document is not None and self.place is not None and self.real is not None
        row = torch.arange(batch, device=self.place.device)[:, None] * self.count + self.document
        return torch.where(self.real, row * self.length + self.place, batch * self.count * self.length).flatten()


def _constant(u: Diagonal, name: str) -> Tensor:
    """`[D, N]`: the product of the factors that do not depend on the token."""
    parts = factors(getattr(u, name))
    product = torch.ones((), dtype=u.dtype, device=parts[0].device)
    for x in parts[1:] if name == "write" else parts:
        product = product * x[0, 0]
    return product


def _powers(log_decay: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """a^e, `[len(e), D, N]`."""
    wide = torch.promote_types(dtype, torch.float64)
    return (exponents.view(-1, 1, 1) * log_decay.to(wide)).exp().to(dtype)


def _check(u: Diagonal) -> None:
    if (u.log_decay is None) == (u.forget is None):
        raise ValueError("a Diagonal needs exactly one of log_decay and forget (1 - decay)")
    for name in _FACTORED:
        for x in factors(getattr(u, name)):
            if not isinstance(x, Tensor) or x.ndim < 3:
                raise ValueError(
                    f"{name} must be a tensor, or a tuple of tensors, of shape [B, T, …], got {describe(x)}"
                )
    shape = u.shape
    if any(size == 0 for size in shape):
        raise ValueError(f"write must not have empty dimensions: shape {list(shape)}")
    for name in _FACTORED[1:]:
        for x in factors(getattr(u, name)):
            if x.ndim != len(shape) or any(n not in (1, m) for n, m in zip(x.shape, shape, strict=True)):
                raise ValueError(f"{name} has shape {list(x.shape)}, expected sizes of write {list(shape)}, or 1")
    check_flags(u.reset, u.mask, shape[:2])
    if isinstance(u.log_decay, Tensor) and values_may_be_read(u.log_decay):
        check_log_decay(u.log_decay.real, u.mask if u.log_decay.shape[:2] == shape[:2] else None)
