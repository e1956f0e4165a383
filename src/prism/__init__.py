"""PRISM: sequence models with a memory of fixed size, computed by one engine.

A *memory* is a matrix per head. A *rule* says from the input alone what is forgotten, erased and written. The *engine*
computes any rule, exactly, in several *forms*. Public names are imported when they are first used: `prism --help` is quick,
memories and layers need torch, and only models need more.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prism.autoload import register_with_transformers
from prism.messages import needs_extra

if TYPE_CHECKING:
    from prism import engine as engine
    from prism import hf as hf
    from prism import models as models
    from prism import nn as nn
    from prism import rules as rules
    from prism.engine import Update, memory
    from prism.hf import accelerate, restore
    from prism.nn import Mixer, State
    from prism.recommend import Recommender

__version__ = "0.2.0"
__all__ = ["Mixer", "Recommender", "State", "Update", "__version__", "accelerate", "memory", "restore", "rules"]

_LAZY = {
    "Mixer": "nn",
    "Recommender": "recommend",
    "State": "nn",
    "Update": "engine",
    "accelerate": "hf",
    "memory": "engine",
    "restore": "hf",
}
_SUBPACKAGES = ("hf", "engine", "models", "nn", "rules")


def __getattr__(name: str) -> Any:
    if name not in _LAZY and name not in _SUBPACKAGES:
        raise AttributeError(f"module 'prism' has no attribute {name!r}")
    with needs_extra(f"prism.{name}", "rec" if name == "Recommender" else "lm"):
        module = import_module(f"prism.{_LAZY.get(name, name)}")
    return getattr(module, name) if name in _LAZY else module


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_SUBPACKAGES})


register_with_transformers()
