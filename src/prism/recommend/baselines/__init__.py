"""Baselines: cheap recommenders without sequence models, ranked and reported like the models.

A baseline is fitted on the training events of a split and is a `Scorer`. It has sets of items instead of sequences: it
reads all events before a target, in no order, and repeated ones count once. Names, with their options and defaults:

    popular                                      the items with most events
    recent_popular(share=0.1)                    the same, of the last tenth of the training events
    item_knn(neighbours=100, shrink=0.0)         items like those of the history, by the cosine of their users
    ease(regularization=500.0)                   the linear model with the best weights between items (Steck 2019)
    als(factors=64, regularization=0.1, alpha=10.0, iterations=15)    matrix factorisation by alternating least squares
    bpr(factors=64, learning_rate=0.05, regularization=0.01, iterations=100)   the same by pairs (Rendle 2009)

als and bpr are those of the library implicit, from the extra `baselines`.
"""

from __future__ import annotations

from prism.recommend.baselines.base import Baseline
from prism.recommend.baselines.compare import compare_baselines
from prism.recommend.baselines.registry import NAMES, fit_baseline, parse_baseline

__all__ = ["NAMES", "Baseline", "compare_baselines", "fit_baseline", "parse_baseline"]
