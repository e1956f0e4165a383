"""What a linear memory is told at every token: the normal form.

Per head the memory is a matrix S `[K, V]`. A rule says, from the input alone, what is forgotten, erased and written:

    S_t = (I - a_t b_tᵀ) · Diag(exp g_t) · S_{t-1}  +  Σ_l k_{t,l} w_{t,l}ᵀ          o_t = S_tᵀ q_t

Design choices
- Decays live in log space and are ≤ 0; nothing in the library ever divides by a decay.
- q, k and the erase may have fewer heads (G, a divisor of H): head h reads group h // (H // G).
- A masked token is the identity: it decays nothing, erases nothing, writes nothing, and a reset on it is ignored. Its
  output is zero, whatever its inputs hold (NaN included).
- Shapes are always checked. Values are checked on the CPU, outside compiled code; on CUDA only with PRISM_CHECK=1,
  because looking at a value there waits for the device.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from prism.engine.compat import have_tangents, transforms_active


class InvalidValueError(ValueError):
    """A tensor holds a value the equations have no meaning for (NaN, a positive log-decay)."""


@dataclass(frozen=True, eq=False)
class Update:
    """The tensors of the normal form for T tokens.

    Args:
        q: `[B, T, G, K]`, what is asked. G divides H.
        k: `[B, T·n, G, L, K]`, the L directions written.
        w: `[B, T·n, H, L, V]`, the L values written, already scaled by their step sizes.
        log_decay: g, `[B, T, H]` (per head) or `[B, T, H, K]` (per key channel); finite and ≤ 0. None: no forgetting.
        erase_key: b, `[B, T·n, G, K]`, the direction that is looked up.
        erase_strength: β, `[B, T·n, H]`; the erase then is a = β·b.
        erase_write: a, `[B, T·n, G, K]`, instead of `erase_strength`.
        erase_first: True erases along the first direction written: `erase_key` is then k's first, whatever was given. The
            kernels share that key's products; everything else computes the same either way.
        erase_on: whether b looks at the `"decayed"` state or at the `"undecayed"` one (RWKV-7, linear Titans).
        read: `"after"` reads S_t, `"before"` reads S_{t-1} (RWKV-6).
        reset: `[B, T]` bool, a document starts here: S_{t-1} counts as zero.
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

    def __post_init__(self) -> None:
        if self.erase_first:
            if self.erase_write is not None:
                raise ValueError("erase_first erases along k's first key with erase_strength: leave erase_write out")
            # Set anew even if there is one: `dataclasses.replace` hands the old key on, perhaps beside a new k.
            if isinstance(self.k, Tensor) and self.k.ndim == 5:  # otherwise the check below says what is wrong
                object.__setattr__(self, "erase_key", self.k[..., 0, :])
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
        """All that may have gradients."""
        return self.q, self.k, self.w, self.log_decay, self.erase_key, self.erase_strength, self.erase_write

    @property
    def state_dtype(self) -> torch.dtype:
        """Memories are float32, or float64 for float64 inputs."""
        return torch.float64 if self.w.dtype == torch.float64 else torch.float32


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Of either mode."""
    if torch.is_grad_enabled() and any(z is not None and z.requires_grad for z in tensors):
        return True
    return have_tangents(*tensors)


def check_state(update: Update, state: Tensor | None) -> None:
    """An incoming memory must be `[B, H, K, V]`."""
    if state is None:
        return
    expected = (update.batch, update.heads, update.key_dim, update.value_dim)
    if not isinstance(state, Tensor):
        raise ValueError(f"state must be a tensor of shape {list(expected)}, got {type(state).__name__}")
    if tuple(state.shape) != expected:
        raise ValueError(f"state has shape {list(state.shape)}, expected [B, H, K, V] = {list(expected)}")
    _expect_floating("state", state)
    _expect_device("state", state, update)


def _check_shapes(u: Update) -> None:
    for name, rank, letters in (("q", 4, "[B, T, G, K]"), ("k", 5, "[B, T·n, G, L, K]"), ("w", 5, "[B, T·n, H, L, V]")):
        x = getattr(u, name)
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor of shape {letters}, got {type(x).__name__}")
        if x.ndim != rank:
            raise ValueError(f"{name} must have {rank} dimensions {letters}, got shape {list(x.shape)}")
        _expect_floating(name, x)
    if u.erase_on not in ("decayed", "undecayed"):
        raise ValueError(f"erase_on must be 'decayed' or 'undecayed', got {u.erase_on!r}")
    if u.read not in ("after", "before"):
        raise ValueError(f"read must be 'after' or 'before', got {u.read!r}")
    if not isinstance(u.substeps, int) or u.substeps < 1:
        raise ValueError(f"substeps must be a whole number ≥ 1, got {u.substeps!r}")

    B, T, _, K = u.q.shape
    _, _, H, L, V = u.w.shape
    rows = T * u.substeps
    if T == 0:
        raise ValueError(f"q has no tokens: shape {list(u.q.shape)}, expected T ≥ 1 in [B, T, G, K]")
    if min(B, K, H, L, V) == 0:
        raise ValueError(f"q {list(u.q.shape)} and w {list(u.w.shape)} must not have empty dimensions")

    if (u.erase_strength is not None or u.erase_write is not None) and u.erase_key is None:
        raise ValueError("erase_strength and erase_write need erase_key, the direction that is erased")
    if u.erase_key is not None and (u.erase_strength is None) == (u.erase_write is None):
        raise ValueError("erase_key needs exactly one of erase_strength (a = β·b) and erase_write (a)")

    _expect("w", u.w, (B, rows, H, L, V), "[B, T·n, H, L, V]")
    _expect("q", u.q, (B, T, None, K), "[B, T, G, K]", heads=H)
    _expect("k", u.k, (B, rows, None, L, K), "[B, T·n, G, L, K]", heads=H)
    _expect("erase_key", u.erase_key, (B, rows, None, K), "[B, T·n, G, K]", heads=H)
    _expect("erase_write", u.erase_write, (B, rows, None, K), "[B, T·n, G, K]", heads=H)
    _expect("erase_strength", u.erase_strength, (B, rows, H), "[B, T·n, H]")
    if u.log_decay is not None and isinstance(u.log_decay, Tensor) and u.log_decay.ndim == 3:
        _expect("log_decay", u.log_decay, (B, T, H), "[B, T, H]")
    else:
        _expect("log_decay", u.log_decay, (B, T, H, K), "[B, T, H] or [B, T, H, K]")
    for name in ("log_decay", "erase_key", "erase_strength", "erase_write"):
        _expect_floating(name, getattr(u, name))
    for name in ("reset", "mask"):
        x = getattr(u, name)
        _expect(name, x, (B, T), "[B, T]")
        if x is not None and x.dtype != torch.bool:
            raise ValueError(f"{name} must be a bool tensor, got {x.dtype}")
    for name in ("q", "k", "log_decay", "erase_key", "erase_strength", "erase_write", "reset", "mask"):
        _expect_device(name, getattr(u, name), u)


def _expect(name: str, x: Tensor | None, shape: tuple[int | None, ...], letters: str, heads: int | None = None) -> None:
    """`None` in `shape` stands for the head axis, which may hold any divisor of `heads`."""
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor of shape {letters}, got {type(x).__name__}")
    wanted = [heads if n is None else n for n in shape]
    fits = x.ndim == len(shape) and all(n is None or n == m for n, m in zip(shape, x.shape, strict=True))
    if not fits:
        raise ValueError(f"{name} has shape {list(x.shape)}, expected {letters} = {wanted}")
    if heads is not None and (x.shape[2] == 0 or heads % x.shape[2] != 0):
        raise ValueError(
            f"{name} has {x.shape[2]} heads, which does not divide w's {heads}: shape {list(x.shape)}, expected {wanted}"
        )


def _expect_floating(name: str, x: Tensor | None) -> None:
    if x is not None and not x.dtype.is_floating_point:
        raise ValueError(f"{name} must be a floating-point tensor, got {x.dtype}")


def _expect_device(name: str, x: Tensor | None, u: Update) -> None:
    """A kernel that reads another device's memory leaves a GPU that answers nothing any more."""
    if x is not None and x.device != u.w.device:
        raise ValueError(f"{name} is on {x.device}, expected w's device, {u.w.device}")


def values_may_be_read(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or x.is_meta or transforms_active(x):
        return False
    return x.device.type == "cpu" or os.environ.get("PRISM_CHECK") == "1"


def check_log_decay(log_decay: Tensor, mask: Tensor | None) -> None:
    """`[B, T, …]` must be finite and ≤ 0 where `mask` `[B, T]` says that a token is real."""
    g = log_decay.detach()
    # One pass when all is well (NaN fails the comparison too); what is wrong is found out only when something is.
    good = (g <= 0) & (g > -torch.inf)
    if mask is not None:
        good = good | ~mask.reshape(*mask.shape, *[1] * (g.ndim - 2))
    if bool(good.all()):
        return
    worst = g[~good]
    if bool(torch.isnan(worst).any()):
        raise InvalidValueError("log_decay holds NaN; it must be finite and ≤ 0")
    if bool((worst > 0).any()):
        raise InvalidValueError(f"log_decay must be ≤ 0, got {worst.max().item():.6g}: pass the logarithm of the decay")
    raise InvalidValueError("log_decay holds -inf; it must be finite (use `reset` to forget everything)")
