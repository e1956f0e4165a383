"""Call Triton's private interface, each call with a fallback to the public one.

This is separate from `engine/compat.py` (torch) because it imports Triton, which `import prism` must not do. The calls work
with the versions that `available.py` admits. Where a version lacks one of them, kernels are started as `kernel[grid](…)` and
descriptors are built by their constructor: slower on the host, with the same results.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def argument_names(kernel: Any) -> Sequence[str]:
    """A kernel's argument names in the order of its signature."""
    names = getattr(kernel, "arg_names", None)
    return list(inspect.signature(kernel.fn).parameters) if names is None else names


def compiles_ahead() -> bool:
    """Whether kernels can be compiled before they are started. Otherwise each is compiled at its first start."""
    return hasattr(triton, "AsyncCompileMode") and hasattr(triton.JITFunction, "warmup")


def asynchronous(threads: Executor) -> AbstractContextManager[Any]:
    """A context in which `compile_ahead` returns immediately and compiles on `threads`."""
    return triton.AsyncCompileMode(threads)


def compile_ahead(kernel: Any, count: int, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    """Compile a kernel for these arguments without starting it. `startable` waits for the result."""
    return kernel.warmup(*arguments, grid=(count,), **options)


def startable(kernel: Any) -> Any:
    """The compiled kernel, which `kernel[grid](*arguments, *constants)` starts without inspecting its arguments, or None.

    None where Triton returned no compiled kernel: the interpreter compiles nothing. Waits for a kernel that another thread or
    an interrupted call is still compiling.
    """
    if hasattr(kernel, "result"):
        kernel = kernel.result()
    return kernel if hasattr(kernel, "__getitem__") else None


def build_launcher(compiled: Any) -> None:
    """Build the host side of a launch now (half a second of a C compiler); otherwise the first start does."""
    getattr(compiled, "run", None)


def cache_folder() -> Path:
    """Where Triton keeps compiled kernels, also those of other processes."""
    folder = getattr(getattr(getattr(triton, "knobs", None), "cache", None), "dir", None)
    return Path(folder or os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def _has_only_fields() -> bool:
    """Whether a descriptor's only state is its dataclass fields, so that copying those copies the descriptor."""
    fields = getattr(TensorDescriptor, "__dataclass_fields__", {})
    if "base" not in fields:
        return False
    example = TensorDescriptor(torch.empty(16, device="cpu"), [1, 16], [16, 1], [1, 16])
    return getattr(example, "__dict__", {}).keys() == fields.keys()


def copied_descriptor(template: TensorDescriptor, z: Tensor) -> TensorDescriptor:
    """The template's descriptor for z's memory, without checking it again: a call needs dozens of these."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(template.__dict__)
    descriptor.base = z
    return descriptor


def built_descriptor(template: TensorDescriptor, z: Tensor) -> TensorDescriptor:
    """The template's descriptor for z's memory, by the public constructor."""
    return TensorDescriptor(z, template.shape, template.strides, template.block_shape)


descriptor_on = copied_descriptor if _has_only_fields() else built_descriptor
