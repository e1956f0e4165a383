"""Models that other tools know how to use: one language model and one recommender for all rules, in the transformers
library's shape.

Importing this package makes `AutoConfig` know PRISM's configurations; making a configuration makes `AutoModel` (and
`AutoModelForCausalLM`) know its models (see auto.py). Nothing heavier than a configuration is imported before that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prism.models import auto  # noqa: F401 - registers with transformers
from prism.models.config import PrismConfig, PrismRecConfig

if TYPE_CHECKING:
    from prism.models.cache import PrismCache
    from prism.models.language import PrismForCausalLM, PrismModel
    from prism.models.recommender import PrismForRecommendation
    from prism.models.replay import ReplayedCache

_LAZY = {
    "PrismCache": "prism.models.cache",
    "PrismModel": "prism.models.language",
    "PrismForCausalLM": "prism.models.language",
    "PrismForRecommendation": "prism.models.recommender",
    "ReplayedCache": "prism.models.replay",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'prism.models' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


__all__ = [
    "PrismCache",
    "PrismConfig",
    "PrismForCausalLM",
    "PrismForRecommendation",
    "PrismModel",
    "PrismRecConfig",
    "ReplayedCache",
]
