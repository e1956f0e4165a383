"""Which extra brings a library that is not there."""

from __future__ import annotations

_CLI = ("tyro", "rich", "tomli")
BROUGHT_BY = {
    "cli": _CLI,
    "plots": ("matplotlib",),
    "lm": ("transformers", "tokenizers", "datasets", "tensorboard", "filelock", *_CLI),
    "rec": ("transformers", "polars", "filelock", *_CLI),
    "eval": ("lm_eval",),
    "gpu": ("triton",),
}


def missing(error: BaseException, likely: str) -> str | None:
    """A sentence, if the error is that a library of an extra is not installed: `likely`, if that has it."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    extras = [extra for extra, modules in BROUGHT_BY.items() if module in modules]
    if not extras:
        return None
    extra = likely if likely in extras else extras[0]
    return (
        f"needs {module}, of the extra {extra}: pip install 'prism-sequence[{extra}]' (in a clone of it '.[{extra}]')"
    )
