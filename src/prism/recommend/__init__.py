"""Recommenders: trained on events, asked for users or sequences, kept up to date event by event.

This half serves and imports nothing of prism.train; `Recommender.fit` imports task.py when it is called.
"""

from prism.recommend.recommender import Recommender
from prism.recommend.results import Recommendations
from prism.recommend.states import UserStates

__all__ = ["Recommendations", "Recommender", "UserStates"]
