"""PRISM: sequence models with a memory of fixed size, seen as one thing.

A *memory* is a matrix per head, a *rule* says from the input alone what is forgotten, erased and written, and the *engine*
computes any rule, exactly, in several *forms*. What this package has is imported when it is first asked for: `prism --help`
waits for nothing, memories and layers need torch, and only models need more.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prism.autoload import register_with_transformers
from prism.messages import missing_extra

if TYPE_CHECKING:
    from prism import engine as engine
    from prism import models as models
    from prism import nn as nn
    from prism import rules as rules
    from prism.engine import Update, memory
    from prism.nn import Mixer, State
    from prism.recommend import Recommender

__version__ = "0.1.0"
__all__ = ["Mixer", "Recommender", "State", "Update", "__version__", "memory", "rules"]

_HOMES = {"Mixer": "nn", "Recommender": "recommend", "State": "nn", "Update": "engine", "memory": "engine"}
_PARTS = ("engine", "models", "nn", "rules")


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _PARTS:
        raise AttributeError(f"module 'prism' has no attribute {name!r}")
    try:
        home = import_module(f"prism.{_HOMES.get(name, name)}")
    except ModuleNotFoundError as error:
        message = missing_extra(error, "rec" if name == "Recommender" else "lm")
        if message is None:
            raise
        raise ImportError(f"prism.{name} {message}") from error
    return getattr(home, name) if name in _HOMES else home


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PARTS})


register_with_transformers()
