"""Use private names of transformers, each with a fallback or a warning.

This is separate from `engine/compat.py` (torch) because the engine must not import transformers. Marks that transformers
leaves on tensors and modules are read here. Methods and class attributes that the models override are listed in
`OVERRIDDEN`: a transformers version without such a name would ignore ours, so a warning says so.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from prism.models.rollback import DEPTH

LOADED_MARK = "_is_hf_initialized"

OVERRIDDEN = {
    "PreTrainedModel": (
        "_init_weights",
        "_initialize_weights",
        "_keep_in_fp32_modules_strict",
        "_no_split_modules",
        "_skip_keys_device_placement",
        "_tied_weights_keys",
    ),
    "GenerationMixin": ("_prepare_cache_for_generation",),
    "PreTrainedConfig": ("_get_generation_parameters",),
}
"""Private names that PRISM's models override, by the class of transformers they belong to."""


def compile_chat_template(text: str) -> None:
    """Raise jinja2's TemplateSyntaxError if a chat template is not valid, with the tags that transformers adds.

    A transformers version without this function checks a template when it is first used.
    """
    from transformers.utils import chat_template_utils

    check = getattr(chat_template_utils, "_compile_jinja_template", None)
    if check is not None:
        check(text)


def tokens_removed(number: int, tokens: int) -> int:
    """How many of `tokens` tokens `crop(number)` removes: -n is n; a positive number is the length that remains.

    `crop(0)` removes none, except in versions of transformers that always pass a length.
    """
    if number < 0:
        return -number
    from transformers import Cache  # not needed to create a configuration

    if number == 0 and "max_length" not in signature(Cache.crop).parameters:
        return 0
    return max(tokens - number, 0)


def tokens_to_record(generation_config: Any, generation_mode: Any) -> int:
    """How many last tokens this call of `generate` must be able to remove from its cache; 0: it never removes any.

    From an assistant's cache all that it writes. From an assisted model's cache only tokens of the last forward pass, which
    can always be removed.
    """
    if getattr(generation_config, "is_assistant", None):
        return max(DEPTH, (generation_config.max_new_tokens or 0) + 1)
    return DEPTH if generation_mode == "assisted_generation" else 0


def is_loaded(parameter: Tensor) -> bool:
    """Whether transformers filled this parameter from a file. `require_marks` has checked that it marks those."""
    return getattr(parameter, LOADED_MARK, False)


def require_marks() -> None:
    """Refuse a transformers version that marks loaded weights in another way: they would be initialised again, silently."""
    from transformers import initialization  # in transformers 5, whose models initialise their weights through it

    marked = torch.zeros(1)
    setattr(marked, LOADED_MARK, True)
    initialization.ones_(marked)
    if marked.item() != 0:
        raise ImportError(
            f"transformers {version('transformers')} marks loaded weights in an unknown way, so they would be overwritten: "
            "install transformers 5"
        )


def forget_initialised(model: nn.Module) -> None:
    """Make `init_weights` initialise every module again, also those marked as done. Without the mark it skips none."""
    for part in model.modules():
        if hasattr(part, LOADED_MARK):
            delattr(part, LOADED_MARK)


def warn_of_missing(*classes: type[Any]) -> None:
    """Warn about overridden names that these classes of transformers no longer have."""
    missing = [f"{c.__name__}.{name}" for c in classes for name in OVERRIDDEN[c.__name__] if not hasattr(c, name)]
    if missing:
        warnings.warn(
            f"this transformers has no {', '.join(missing)}, which PRISM's models override: they may load or generate "
            "differently; install transformers 5",
            stacklevel=2,
        )
