"""Name the extra that installs a missing library."""

from __future__ import annotations

_CLI = ("tyro", "rich", "tomli")
LIBRARIES = {
    "cli": _CLI,
    "plots": ("matplotlib",),
    "lm": ("transformers", "tokenizers", "datasets", "tensorboard", "filelock", *_CLI),
    "rec": ("transformers", "polars", "filelock", *_CLI),
    "eval": ("lm_eval",),
    "gpu": ("triton",),
}


def missing(error: BaseException, likely: str) -> str | None:
    """What to install, if the error is that a library of an extra is missing; otherwise None.

    Args:
        likely: the extra to name if several contain the library.
    """
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    extras = [extra for extra, modules in LIBRARIES.items() if module in modules]
    if not extras:
        return None
    extra = likely if likely in extras else extras[0]
    return f"needs {module}, from the extra {extra}: pip install 'prism-sequence[{extra}]' (in a clone: '.[{extra}]')"
