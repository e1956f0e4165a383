"""User events (who, what, when), from a file to training samples.

The flow, one module a step:

    file or DataFrame
      → formats.py      a table of text, as the file has it; columns.py says which columns matter
      → event_table.py  EventTable: checked values (values.py), one row an event; k_core leaves out rare users and items
      → features.py     what is known of items and users, from columns of the events or from separate tables
      → dataset.py      Dataset: arrays and ids in a folder (histories, catalogue, users, manifest)
      → histories.py    Histories: each user's events in order, in three flat arrays
      → split.py        Split: what is learned from, what is held out to validate and to test
      → samples.py      Samples, RecBatch: histories cut into training samples of one length

ids.py maps ids of users and items to rows. recipe.py holds the settings of all this and caches the Dataset.
synthetic.py makes a Dataset from a seed. large.py makes one from a folder of parquet parts that are larger than memory, and
merge.py one from an old log and new events. Only formats.py, values.py, event_table.py, features.py and large.py work on
tables (polars). Everything after them works on numpy arrays and JSON, so training on a prepared dataset and serving need no
polars.
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
