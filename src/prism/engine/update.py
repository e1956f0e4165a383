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
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Literal

import torch
from torch import Tensor

from prism.engine import compat
from prism.engine.checks import (
    check_device,
    check_flags,
    check_floating,
    check_integer,
    check_log_decay,
    check_shape,
    skipped,
    values_may_be_read,
)
from prism.engine.packed import packed_starts

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
    # Keyword-only fields; `kw_only` per field exists from Python 3.10 on.
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
