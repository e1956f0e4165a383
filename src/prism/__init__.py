"""PRISM: sequence models with a memory of fixed size, seen as one thing.

A *memory* is a matrix per head, a *rule* says from the input alone what is forgotten, erased and written, and the *engine*
computes any rule, exactly, in several *forms*. Importing this package imports torch and nothing heavier.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prism import rules
from prism.autoload import register_with_transformers
from prism.engine import Update, memory
from prism.extras import missing
from prism.nn import Mixer, State

if TYPE_CHECKING:
    from prism import models as models
    from prism.recommend import Recommender

__version__ = "0.1.0"
__all__ = ["Mixer", "Recommender", "State", "Update", "__version__", "memory", "rules"]


def __getattr__(name: str) -> Any:
    """`prism.models` and `prism.Recommender` are imported when first asked for, because they import transformers."""
    try:
        if name == "models":
            return import_module("prism.models")
        if name == "Recommender":
            return import_module("prism.recommend").Recommender
    except ModuleNotFoundError as error:
        told = missing(error, "rec" if name == "Recommender" else "lm")
        if told is None:
            raise
        raise ImportError(f"prism.{name} {told}") from error
    raise AttributeError(f"module 'prism' has no attribute {name!r}")


register_with_transformers()
