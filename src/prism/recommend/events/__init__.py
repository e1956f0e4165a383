"""Logs of events (who, what, when): read once, kept as arrays, split, and cut into training samples.

Only read.py and core.py work on tables (polars); everything after a log is prepared works on numpy arrays and JSON.
"""

from prism.recommend.events.dataset import Dataset, open_dataset
from prism.recommend.events.histories import Histories
from prism.recommend.events.ids import Catalogue, Feature, Users
from prism.recommend.events.recipe import EventRecipe, prepare_dataset
from prism.recommend.events.samples import RecBatch, Samples
from prism.recommend.events.split import Split, Targets, check_leakage, global_time, leave_one_out

__all__ = [
    "Catalogue",
    "Dataset",
    "EventRecipe",
    "Feature",
    "Histories",
    "RecBatch",
    "Samples",
    "Split",
    "Targets",
    "Users",
    "check_leakage",
    "global_time",
    "leave_one_out",
    "open_dataset",
    "prepare_dataset",
]
