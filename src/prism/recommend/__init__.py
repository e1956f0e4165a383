"""Recommenders: train on events, recommend to users or after sequences, keep up with new events.

Serving imports nothing of prism.train; `Recommender.fit` imports task.py when it is called.
"""

from prism.messages import needs_extra

with needs_extra("prism.recommend", "rec"):
    from prism.recommend.recommender import Recommender
    from prism.recommend.results import Recommendations
    from prism.recommend.states import UserStates

__all__ = ["Recommendations", "Recommender", "UserStates"]
