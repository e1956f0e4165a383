"""transformers models: one backbone and one language model for all rules, its cache, loading and conversion.

What enters here is a model that transformers can save, open and generate with; it knows layers (nn/), not products. Start with
config.py and language.py, then cache.py (the state of a model) and loading.py.

Importing this package registers PRISM's configurations with `AutoConfig`. Creating a configuration registers its models with
`AutoModel` and `AutoModelForCausalLM` (see auto.py). Nothing heavier than a configuration is imported before that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prism.messages import needs_extra

with needs_extra("prism.models", "lm"):
    from prism.models import auto  # noqa: F401 - registers with transformers
    from prism.models.config import PrismConfig

if TYPE_CHECKING:
    from prism.models.cache import PrismCache
    from prism.models.convert import convert_model
    from prism.models.decode import Decoder
    from prism.models.language import PrismForCausalLM, PrismModel

_LAZY = {
    "Decoder": "prism.models.decode",
    "PrismCache": "prism.models.cache",
    "PrismModel": "prism.models.language",
    "PrismForCausalLM": "prism.models.language",
    "convert_model": "prism.models.convert",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'prism.models' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


__all__ = [
    "Decoder",
    "PrismCache",
    "PrismConfig",
    "PrismForCausalLM",
    "PrismModel",
    "convert_model",
]
