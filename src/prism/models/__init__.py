"""transformers models: one language model and one recommender for all rules.

Importing this package registers PRISM's configurations with `AutoConfig`. Creating a configuration registers its models with
`AutoModel` and `AutoModelForCausalLM` (see auto.py). Nothing heavier than a configuration is imported before that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prism.models import auto  # noqa: F401 - registers with transformers
from prism.models.config import PrismConfig, PrismRecConfig

if TYPE_CHECKING:
    from prism.models.cache import PrismCache
    from prism.models.convert import convert_model
    from prism.models.decode import Decoder
    from prism.models.language import PrismForCausalLM, PrismModel
    from prism.models.recommender import PrismForRecommendation

_LAZY = {
    "Decoder": "prism.models.decode",
    "PrismCache": "prism.models.cache",
    "PrismModel": "prism.models.language",
    "PrismForCausalLM": "prism.models.language",
    "PrismForRecommendation": "prism.models.recommender",
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
    "PrismForRecommendation",
    "PrismModel",
    "PrismRecConfig",
    "convert_model",
]
