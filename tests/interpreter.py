"""Triton's interpreter, without the three quarters of its time that go to what it did before or does not use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter


def make_quick() -> None:
    """Everything below, once per process."""
    replace_functions_once()
    skip_overflow_checks()
    remember_types()
    remember_shapes()


def replace_functions_once() -> None:
    """Replace the functions of `triton.language` once per launch and module, not at every call of a helper.

    A launch replaces them by functions on numpy and puts them back when it ends. Every call of a helper looks through all
    of them again, and puts nothing back.
    """
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    seen: set[str] = set()

    def replace_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module in seen:
            return None
        seen.add(module)
        return patch(function)

    def launch(executor: Any, *arguments: Any, **options: Any) -> Any:
        seen.clear()
        return run(executor, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch


def skip_overflow_checks() -> None:
    """Every sum and product of integers is also computed in 64 bits, for an assertion that only `debug` would evaluate."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def remember_types() -> None:
    """The numpy type of each type, which is otherwise looked up in a table that is made for the purpose."""
    look_up = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def find(given: Any) -> np.dtype[Any]:
        name = given.scalar.name
        if name not in known:
            known[name] = look_up(given)
        return known[name]

    interpreter._get_np_dtype = find


def remember_shapes() -> None:
    """Types and tensors of one shape share the objects that say so. Nothing changes them."""
    new_type, new_tensor = tl.block_type.__init__, tl.tensor.__init__
    of_types: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def start_type(type: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if sizes not in of_types:
            new_type(type, element_ty, shape)
            of_types[sizes] = type.shape, type.numel, str(type.shape)
        type.element_ty, (type.shape, type.numel, text) = element_ty, of_types[sizes]
        type.name = f"<{text}, {element_ty}>"

    def start_tensor(tensor: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in of_tensors:
            new_tensor(tensor, handle, type)
            of_tensors[sizes] = tensor.numel, tensor.shape
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.numel, tensor.shape = of_tensors[sizes]

    tl.block_type.__init__, tl.tensor.__init__ = start_type, start_tensor
