"""Check and prepare the inputs of a memory: shapes, dtypes, devices, flags, values; padding, grouped heads, packed documents.

Every type of update uses these, so that the same mistake gets the same message, and padding means the same. Shapes are always
checked. Values are checked only where `values_may_be_read` allows it. A masked token must change nothing, even if it holds
NaN: it is replaced by `torch.where`, because NaN · 0 is NaN.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine.compat import transforms_active


class InvalidValueError(ValueError):
    """A tensor holds a value the equations have no meaning for (NaN, a positive log-decay)."""


_skipped = threading.local()


class unchecked:
    """In this thread, check neither shapes nor values of an `Update`: for single tokens, after a prompt that was checked."""

    def __enter__(self) -> None:
        self.before = skipped()
        _skipped.now = True

    def __exit__(self, *_: object) -> None:
        _skipped.now = self.before


def skipped() -> bool:
    """Whether this is inside `unchecked`."""
    return getattr(_skipped, "now", False)


def values_may_be_read(x: Tensor) -> bool:
    """Whether reading a value of x is possible and cheap: on the CPU in eager mode, on CUDA only with PRISM_CHECK=1."""
    if torch.compiler.is_compiling() or x.is_meta or transforms_active(x) or skipped():
        return False
    return x.device.type == "cpu" or os.environ.get("PRISM_CHECK") == "1"


def describe(x: Any) -> str:
    """A wrong argument, for an error message: dtype and shape of a tensor, otherwise the type."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def check_shape(name: str, x: Any, shape: tuple[int | None, ...], letters: str, heads: int | None = None) -> None:
    """x must be a tensor of this shape; `letters` names the dimensions, such as `"[B, T, H]"`.

    None in `shape` stands for the head dimension (the third), which may be any divisor of `heads`.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor of shape {letters}, got {type(x).__name__}")
    given = tuple(x.shape)
    if given == shape:
        return
    if heads is not None and given[:2] + given[3:] == shape[:2] + shape[3:] and given[2] and heads % given[2] == 0:
        return
    expected = [heads if n is None else n for n in shape]
    fits = x.ndim == len(shape) and all(n is None or n == m for n, m in zip(shape, x.shape, strict=True))
    if not fits:
        raise ValueError(f"{name} has shape {list(x.shape)}, expected {letters} = {expected}")
    if heads is not None and (x.shape[2] == 0 or heads % x.shape[2] != 0):
        raise ValueError(
            f"{name} has {x.shape[2]} heads, which does not divide w's {heads}: shape {list(x.shape)}, expected {expected}"
        )


def check_floating(name: str, x: Tensor) -> None:
    if not x.dtype.is_floating_point:
        raise ValueError(f"{name} must be a floating-point tensor, got {x.dtype}")


def check_device(name: str, x: Tensor, device: torch.device) -> None:
    """A kernel that reads another device's memory makes an illegal access, which kills the CUDA context."""
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, expected w's device, {device}")


def check_integer(name: str, n: Any, least: int = 1, optional: bool = False) -> None:
    """n must be an integer ≥ `least`, or None if `optional`."""
    if optional and n is None:
        return
    if not isinstance(n, int) or n < least:
        raise ValueError(f"{name} must be an integer ≥ {least}{' or None' if optional else ''}, got {n!r}")


def check_flags(reset: Any, mask: Any, shape: Sequence[int]) -> None:
    """`reset` and `mask` must be None or bool tensors of shape `[B, T]`."""
    for name, flag in (("reset", reset), ("mask", mask)):
        if flag is None:
            continue
        if not isinstance(flag, Tensor) or flag.dtype != torch.bool or tuple(flag.shape) != tuple(shape):
            raise ValueError(f"{name} must be a bool tensor of shape [B, T] = {list(shape)}, got {describe(flag)}")


def check_padding_last(mask: Tensor | None, kind: str) -> None:
    """Padding must follow a row's real tokens: `mask` `[B, T]` holds no True after a False."""
    if mask is None or not values_may_be_read(mask):
        return
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError(f"mask has padding before real tokens: {kind} takes real tokens first (Mixer takes any order)")


def check_log_decay(log_decay: Tensor, mask: Tensor | None, name: str = "log_decay") -> None:
    """`[B, T, …]` must be finite and ≤ 0 where `mask` `[B, T]` says that a token is real."""
    g = log_decay.detach()
    # One pass if all is well (NaN fails the comparison too). What is wrong is looked up only in a failure.
    good = (g <= 0) & (g > -torch.inf)
    if mask is not None:
        good = good | ~mask.reshape(*mask.shape, *[1] * (g.ndim - 2))
    if bool(good.all()):
        return
    bad = g[~good]
    if bool(torch.isnan(bad).any()):
        raise InvalidValueError(f"{name} holds NaN; it must be finite and ≤ 0")
    if bool((bad > 0).any()):
        raise InvalidValueError(f"{name} must be ≤ 0, got {bad.max().item():.6g}: pass the logarithm of the decay")
    raise InvalidValueError(f"{name} holds -inf; it must be finite (use `reset` to forget everything)")


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """x `[B, T, …]` with zeros where `mask` `[B, T]` is False."""
    if mask is None:
        return x
    return torch.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, 0.0)


def real_resets(reset: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """`reset` `[B, T]` without those on padding, which are ignored."""
    return reset if reset is None or mask is None else reset & mask


def moved_starts(starts: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
    """`starts` `[B, T]` with those on padding moved to the row's next real token; dropped if there is none.

    Args:
        positions: `[B, T]`, the tokens' places in their documents. A start then moves only to a token that counts from there:
            callers also number padding inside a document by zeros.
    """
    places = torch.arange(starts.shape[1], device=starts.device)
    start, real = (torch.where(flags, places, -1).cummax(1).values for flags in (starts, mask))
    moved = mask & (start > F.pad(real[:, :-1], (1, 0), value=-1))  # a start since the last real token
    return moved if positions is None else moved & (places - start == positions)


def repeat_mask(mask: Tensor | None, substeps: int) -> Tensor | None:
    """`[B, T]` → `[B, T·n]`: a token's flag at each of its n sub-steps."""
    return mask if mask is None or substeps == 1 else mask.repeat_interleave(substeps, 1)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, G, …]` → `[B, T, H, …]`: head h gets group h // (H // G)."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def packed_starts(
    cu_seqlens: Any, reset: Tensor | None, shape: Sequence[int], mask: Tensor | None = None
) -> Tensor | None:
    """`reset`, or from offsets `[n + 1]` of n documents in one row `[1, T]`: bool `[1, T]`, True where one starts.

    The first document continues a state that comes in, so that its start is not among them. Offsets are 0 first and T last
    and do not decrease; equal ones are an empty document. With `mask` `[1, T]` a document whose first tokens are padding
    starts at its first real token.

    >>> packed_starts(torch.tensor([0, 2, 5]), None, (1, 5))
    tensor([[False, False,  True, False, False]])
    """
    if cu_seqlens is None:
        return reset
    if reset is not None:
        raise ValueError("reset and cu_seqlens both say where documents start: give one of them")
    batch, tokens = shape[0], shape[1]
    check_offsets_tensor(cu_seqlens)
    if batch != 1:
        raise ValueError(
            f"cu_seqlens packs documents into one row [1, T], got {batch} rows: flatten them, or use reset"
        )
    if values_may_be_read(cu_seqlens):
        check_offsets(cu_seqlens, tokens)
    starts = torch.zeros(tokens + 1, dtype=torch.bool, device=cu_seqlens.device)  # an empty document may start at T
    starts[cu_seqlens[1:-1].long()] = True
    starts = starts[:tokens].unsqueeze(0)
    fits = (
        isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == starts.shape
    )  # if not, others complain
    return moved_starts(starts, mask) if mask is not None and fits else starts


def check_offsets_tensor(offsets: Any, name: str = "cu_seqlens") -> None:
    """Raise an error unless this is an integer tensor `[n + 1]`, n ≥ 1. Reads no values."""
    integers = isinstance(offsets, Tensor) and offsets.dtype in (torch.int32, torch.int64)
    if not integers or offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError(f"{name} must be an integer tensor of n + 1 offsets, got {describe(offsets)}")


def check_offsets(offsets: Tensor, tokens: int, name: str = "cu_seqlens") -> None:
    """Raise an error unless offsets rise from 0 to the number of tokens. Reads the values."""
    found = offsets.tolist()
    if found[0] != 0 or found[-1] != tokens or any(b < a for a, b in pairwise(found)):
        shown = str(found if len(found) <= 8 else [*found[:4], "…", *found[-3:]]).replace("'", "")
        raise ValueError(f"{name} must rise from 0 to the number of tokens, {tokens}, got {shown}")


def without_autocast(run: Callable[..., Any], *arguments: Any) -> Any:
    """Call `run(*arguments)` with autocast off on the CPU and on CUDA."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return without_autocast(run, *arguments)  # it may be on for the other device, too
    return run(*arguments)
