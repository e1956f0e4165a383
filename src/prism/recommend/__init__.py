"""Recommenders in use: trained on a log, asked for users or sequences, and kept up to date event by event."""

from prism.recommend.recommender import Recommender
from prism.recommend.results import Recommendations
from prism.recommend.states import UserStates

__all__ = ["Recommendations", "Recommender", "UserStates"]
