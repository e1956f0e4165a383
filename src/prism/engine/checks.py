"""Check the arguments of updates: shapes, dtypes, devices, flags, values.

Every type of update uses these, so that the same mistake gets the same message. Shapes are always checked. Values are
checked only where `values_may_be_read` allows it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
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
