"""Triton's interpreter, without the half of its time that it spends on replacing what it has replaced already."""

from __future__ import annotations

from typing import Any

import triton.runtime.interpreter as interpreter


def replace_functions_once() -> None:
    """Replace the functions of `triton.language` once per launch and module, not at every call of a helper.

    A launch replaces them by functions on numpy and puts them back when it ends. Every call of a helper looks through all
    of them again, and puts nothing back.
    """
    replace, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    seen: set[str] = set()

    def replace_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module in seen:
            return None
        seen.add(module)
        return replace(function)

    def launch(executor: Any, *arguments: Any, **options: Any) -> Any:
        seen.clear()
        return run(executor, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch
