"""Recommenders: train on events, recommend to users or after sequences, keep up with new events.

What enters here knows items, users and events; the backbone is that of models/, and nothing of language/ is used. Start with
recommender.py (`Recommender`, with the design choices at the top), then model.py and events/__init__.py (from a file to
samples). Serving imports nothing of prism.train: `Recommender.fit` imports task.py when it is called. Names are imported when
they are first used: transformers only needs config.py.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prism.messages import needs_extra

if TYPE_CHECKING:
    from prism.recommend.config import PrismRecConfig
    from prism.recommend.model import PrismForRecommendation
    from prism.recommend.recommender import Recommender
    from prism.recommend.results import Recommendations
    from prism.recommend.states import UserStates

_LAZY = {
    "PrismForRecommendation": "model",
    "PrismRecConfig": "config",
    "Recommendations": "results",
    "Recommender": "recommender",
    "UserStates": "states",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'prism.recommend' has no attribute {name!r}")
    with needs_extra("prism.recommend", "rec"):
        return getattr(import_module(f"prism.recommend.{_LAZY[name]}"), name)


__all__ = ["PrismForRecommendation", "PrismRecConfig", "Recommendations", "Recommender", "UserStates"]
