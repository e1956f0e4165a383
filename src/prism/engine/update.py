"""The inputs of a linear memory at every token, in one normal form.

Per head the memory is a matrix S `[K, V]`. A rule says, from the input alone, what is forgotten, erased and written:

    S_t = (I - a_t b_tᵀ) · Diag(exp g_t) · S_{t-1}  +  Σ_l k_{t,l} w_{t,l}ᵀ          o_t = S_tᵀ q_t

Design choices
- Decays live in log space and are ≤ 0; nothing in the library ever divides by a decay.
- q, k and the erase may have fewer heads (G, a divisor of H): head h reads group h // (H // G).
- A masked token is the identity: it decays nothing, erases nothing, writes nothing, and a reset on it is ignored. Its
  output is zero, even if its inputs hold NaN.
- Shapes are always checked. Values are checked on the CPU, outside compiled code; on CUDA only with PRISM_CHECK=1,
  because reading a value there waits for the device.
- Every form in torch computes plain rows (`Steps`): one per (sub-)step, all heads in every tensor, padding as identities. So
  none of them handles masks, groups, sub-steps or low precision.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from prism.engine import compat
from prism.engine.inputs import (
    check_device,
    check_flags,
    check_floating,
    check_integer,
    check_log_decay,
    check_shape,
    packed_starts,
    real_resets,
    repeat_heads,
    repeat_mask,
    skipped,
    values_may_be_read,
    zero_padding,
)

_OPTIONAL = ("log_decay", "erase_key", "erase_strength", "erase_write")


@dataclass(frozen=True, eq=False)
class Update:
    """The tensors of the normal form for T tokens.

    Args:
        q: `[B, T, G, K]`, the queries. G divides H.
        k: `[B, T·n, G, L, K]`, the L directions written.
        w: `[B, T·n, H, L, V]`, the L values written, already scaled by their step sizes.
        log_decay: g, `[B, T, H]` (per head) or `[B, T, H, K]` (per key channel); finite and ≤ 0. None: no forgetting.
        erase_key: b, `[B, T·n, G, K]`, the direction that the erase reads.
        erase_strength: β, `[B, T·n, H]`; the erase then is a = β·b.
        erase_write: a, `[B, T·n, G, K]`, instead of `erase_strength`.
        erase_first: True erases along the first direction written: `erase_key` is then set to k's first key, even if one
            was given. The kernels then share that key's products; the results are the same either way.
        erase_write_first: True erases with a = k's first key, whatever direction `erase_key` it reads (Gated DeltaNet-2):
            `erase_write` is then set to that key, even if one was given. The kernels then need no extra column for the erase.
        erase_on: whether b reads the `"decayed"` state or the `"undecayed"` one (RWKV-7, linear Titans).
        read: `"after"` reads S_t, `"before"` reads S_{t-1} (RWKV-6).
        reset: `[B, T]` bool, a document starts here: S_{t-1} counts as zero.
        cu_seqlens: offsets `[n + 1]` of n documents in one packed row `[1, T]`, instead of `reset`, which it sets. The first
            document continues the state that comes in; the state that comes out is that of the last one with real tokens.
        mask: `[B, T]` bool, False is padding.
        substeps: n, how many erase-and-write steps a token makes (DeltaProduct). The decay and the reset belong to the
            first, the read to the last (`read="before"`: to the first).
    """

    q: Tensor
    k: Tensor
    w: Tensor
    log_decay: Tensor | None = None
    erase_key: Tensor | None = None
    erase_strength: Tensor | None = None
    erase_write: Tensor | None = None
    erase_on: Literal["decayed", "undecayed"] = field(default="decayed", kw_only=True)
    read: Literal["after", "before"] = field(default="after", kw_only=True)
    reset: Tensor | None = field(default=None, kw_only=True)
    mask: Tensor | None = field(default=None, kw_only=True)
    substeps: int = field(default=1, kw_only=True)
    erase_first: bool = field(default=False, kw_only=True)
    erase_write_first: bool = field(default=False, kw_only=True)
    cu_seqlens: InitVar[Tensor | None] = field(default=None, kw_only=True)

    def __post_init__(self, cu_seqlens: Tensor | None) -> None:
        if cu_seqlens is not None and isinstance(self.q, Tensor) and self.q.ndim == 4:
            object.__setattr__(self, "reset", packed_starts(cu_seqlens, self.reset, self.q.shape[:2], self.mask))
        if self.erase_first and self.erase_write_first:
            raise ValueError("erase_first sets erase_key and erase_write_first sets erase_write: give one of them")
        if self.erase_first and self.erase_write is not None:
            raise ValueError("erase_first erases along k's first key with erase_strength: leave erase_write out")
        if self.erase_write_first and self.erase_strength is not None:
            raise ValueError(
                "erase_write_first erases with a = k's first key: leave erase_strength out, scale erase_key"
            )
        # Set even if there is one: `dataclasses.replace` passes the old key, perhaps together with a new k.
        if isinstance(self.k, Tensor) and self.k.ndim == 5:  # otherwise the check below says what is wrong
            if self.erase_first:
                object.__setattr__(self, "erase_key", self.k[..., 0, :])
            if self.erase_write_first:
                object.__setattr__(self, "erase_write", self.k[..., 0, :])
        if skipped():
            return
        _check_shapes(self)
        if self.log_decay is not None and values_may_be_read(self.w):
            check_log_decay(self.log_decay, self.mask)

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def heads(self) -> int:
        return self.w.shape[2]

    @property
    def key_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def value_dim(self) -> int:
        return self.w.shape[-1]

    @property
    def writes(self) -> int:
        """L, how many directions one (sub-)step writes."""
        return self.k.shape[3]

    @property
    def per_channel(self) -> bool:
        return self.log_decay is not None and self.log_decay.ndim == 4

    @property
    def erases(self) -> bool:
        return self.erase_key is not None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All fields that may have gradients; None where a field is not given."""
        return self.q, self.k, self.w, self.log_decay, self.erase_key, self.erase_strength, self.erase_write

    @property
    def state_dtype(self) -> torch.dtype:
        """Memories are float32, or float64 for float64 inputs."""
        return torch.float64 if self.w.dtype == torch.float64 else torch.float32


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Whether a gradient, reverse or forward mode, is wanted of one of these."""
    if torch.is_grad_enabled() and any(z is not None and z.requires_grad for z in tensors):
        return True
    return compat.have_tangents(*tensors)


def check_state(update: Update, state: Tensor | None) -> None:
    """An incoming memory must be `[B, H, K, V]`, floating-point, on the device of w."""
    if state is None:
        return
    shape = (update.batch, update.heads, update.key_dim, update.value_dim)
    check_shape("state", state, shape, "[B, H, K, V]")
    check_floating("state", state)
    check_device("state", state, update.w.device)


def _check_shapes(u: Update) -> None:
    for name, rank, letters in (("q", 4, "[B, T, G, K]"), ("k", 5, "[B, T·n, G, L, K]"), ("w", 5, "[B, T·n, H, L, V]")):
        x = getattr(u, name)
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor of shape {letters}, got {type(x).__name__}")
        if x.ndim != rank:
            hint = f"; for one write per token pass {name}.unsqueeze(3)" if rank == 5 and x.ndim == 4 else ""
            raise ValueError(f"{name} must have {rank} dimensions {letters}, got shape {list(x.shape)}{hint}")
        check_floating(name, x)
    if u.erase_on not in ("decayed", "undecayed"):
        raise ValueError(f"erase_on must be 'decayed' or 'undecayed', got {u.erase_on!r}")
    if u.read not in ("after", "before"):
        raise ValueError(f"read must be 'after' or 'before', got {u.read!r}")
    check_integer("substeps", u.substeps)

    B, T, _, K = u.q.shape
    _, _, H, L, V = u.w.shape
    rows = T * u.substeps
    if T == 0:
        raise ValueError(f"q has no tokens: shape {list(u.q.shape)}, expected T ≥ 1 in [B, T, G, K]")
    if any(size == 0 for size in (B, K, H, L, V)):  # min would fix a traced batch to a range
        raise ValueError(f"q {list(u.q.shape)} and w {list(u.w.shape)} must not have empty dimensions")

    if (u.erase_strength is not None or u.erase_write is not None) and u.erase_key is None:
        raise ValueError("erase_strength and erase_write need erase_key, the direction that is erased")
    if u.erase_key is not None and (u.erase_strength is None) == (u.erase_write is None):
        raise ValueError("erase_key needs exactly one of erase_strength (a = β·b) and erase_write (a)")

    check_shape("w", u.w, (B, rows, H, L, V), "[B, T·n, H, L, V]")
    check_shape("q", u.q, (B, T, None, K), "[B, T, G, K]", heads=H)
    check_shape("k", u.k, (B, rows, None, L, K), "[B, T·n, G, L, K]", heads=H)
    for name in ("erase_key", "erase_write"):
        x = getattr(u, name)
        if x is not None:
            check_shape(name, x, (B, rows, None, K), "[B, T·n, G, K]", heads=H)
    if u.erase_strength is not None:
        check_shape("erase_strength", u.erase_strength, (B, rows, H), "[B, T·n, H]")
    if isinstance(u.log_decay, Tensor) and u.log_decay.ndim == 3:
        check_shape("log_decay", u.log_decay, (B, T, H), "[B, T, H]")
    elif u.log_decay is not None:
        check_shape("log_decay", u.log_decay, (B, T, H, K), "[B, T, H] or [B, T, H, K]")
    for name in _OPTIONAL:
        x = getattr(u, name)
        if x is not None:
            check_floating(name, x)
    check_flags(u.reset, u.mask, (B, T))
    for name in ("q", "k", *_OPTIONAL, "reset", "mask"):
        x = getattr(u, name)
        if x is not None:
            check_device(name, x, u.w.device)


@dataclass(frozen=True)
class Steps:
    """An update as R = T·n rows: `[B, R, H, …]` throughout, in the state's dtype.

    Without `erase_write` an erase writes with k's first key: a = β k_1 and b = k_1, or a = k_1 and `erase_key`.
    """

    q: Tensor  # [B, R, H, K]; [B, R, G, K] if groups of heads share queries and keys
    k: Tensor  # [B, R, H, L, K]; [B, R, G, L, K]
    w: Tensor  # [B, R, H, L, V]
    log_decay: Tensor | None  # [B, R, H] or [B, R, H, K]
    erase_key: Tensor | None  # b, [B, R, H, K]
    erase_write: Tensor | None  # a, [B, R, H, K]
    reset: Tensor | None  # [B, R]
    erase_decayed: bool
    read_after: bool
    substeps: int
    out_dtype: torch.dtype
    erase_strength: Tensor | None = None  # β, [B, R, H], where k's first key is erased

    @property
    def rows(self) -> int:
        return self.q.shape[1]

    @property
    def erases_with_first_key(self) -> bool:
        """Whether the erase shares the columns of k's first key: it has no `erase_write`."""
        return self.erase_write is None and (self.erase_key is not None or self.erase_strength is not None)

    def with_erase_columns(self) -> Steps:
        """The same steps with the erase as a and b."""
        if not self.erases_with_first_key:
            return self
        first = self.k[..., 0, :]
        b = first if self.erase_key is None else self.erase_key
        a = first if self.erase_strength is None else self.erase_strength.unsqueeze(-1) * first
        return replace(self, erase_key=b, erase_write=a, erase_strength=None)

    def read(self, o: Tensor) -> Tensor:
        """`[B, R, H, V]` → `[B, T, H, V]`: the row at which each token reads, in the caller's dtype."""
        if self.substeps > 1:
            o = o[:, self.substeps - 1 if self.read_after else 0 :: self.substeps]
        return o.to(self.out_dtype)

    def initial(self, state: Tensor | None) -> Tensor:
        """The incoming memory `[B, H, K, V]`, zeros if there is none."""
        if state is not None:
            return state.to(self.q.dtype)
        B, _, H, _, V = self.w.shape
        return self.q.new_zeros(B, H, self.q.shape[-1], V)

    def with_all_heads(self) -> Steps:
        """The same steps with q and k repeated to all heads."""
        heads = self.w.shape[2]
        return replace(self, q=repeat_heads(self.q, heads), k=repeat_heads(self.k, heads))


def steps_of(u: Update) -> Steps:
    """The steps of an update, with the erase as a and b."""
    return steps_keeping_first(u).with_erase_columns()


def steps_keeping_first(u: Update, groups: bool = False) -> Steps:
    """The steps of an update. An erase that is declared to write with the first key has no `erase_write`.

    With `groups` q and k have one head for each group of heads that shares both.
    """
    n, H, dtype = u.substeps, u.heads, u.state_dtype
    shared = max(u.q.shape[2], u.k.shape[2])
    if not groups or shared % u.q.shape[2] or shared % u.k.shape[2]:
        shared = H
    per_row = repeat_mask(u.mask, n)

    def prepare(x: Tensor | None, mask: Tensor | None, heads: int = H) -> Tensor | None:
        return None if x is None else repeat_heads(zero_padding(x.to(dtype), mask), heads)

    q, g = prepare(u.q, u.mask, shared), prepare(u.log_decay, u.mask)
    k, w = prepare(u.k, per_row, shared), prepare(u.w, per_row)
    a = None if u.erase_write_first else prepare(u.erase_write, per_row)
    b = None if u.erase_first else prepare(u.erase_key, per_row)
    beta = prepare(u.erase_strength, per_row)
    if beta is not None and b is not None:
        a = beta.unsqueeze(-1) * b
    reset = real_resets(u.reset, u.mask)
    assert q is not None and k is not None and w is not None
    first, last = 0, n - 1
    return Steps(
        q=at_substep(q, n, last if u.read == "after" else first),
        k=k,
        w=w,
        log_decay=None if g is None else at_substep(g, n, first),
        erase_key=b,
        erase_write=a,
        reset=None if reset is None else at_substep(reset, n, first),
        erase_decayed=u.erase_on == "decayed",
        read_after=u.read == "after",
        substeps=n,
        out_dtype=u.w.dtype,
        erase_strength=beta if u.erase_first else None,
    )


def at_substep(x: Tensor, n: int, position: int) -> Tensor:
    """`[B, T, …]` → `[B, T·n, …]`: x at one sub-step of each token, zero (False) at the others."""
    if n == 1:
        return x
    zero = torch.zeros_like(x)
    return torch.stack([x if j == position else zero for j in range(n)], 2).flatten(1, 2)
