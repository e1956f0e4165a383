"""Open a recommender's folder: the model of a run, and the events that it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from prism.files import MANIFEST, read_json
from prism.models.loading import is_run
from prism.overrides import override
from prism.recommend.events import Catalogue, Dataset, Histories, Users, open_dataset, prepare_dataset
from prism.recommend.events.dataset import EVENTS, ITEMS, TRAINING, USERS, reindex_items
from prism.recommend.events.recipe import EventRecipe, RecDataSettings, make_dataset


@contextmanager
def model_folder(path: Path, report: Callable[[str], None] = lambda message: None) -> Iterator[Path]:
    """The model folder of a path: the path itself, or for a run the model that it would export now."""
    if not is_run(path):
        yield path
        return
    from prism.recommend.export import write_model  # only a run needs the trainer
    from prism.train import export

    with export.resolve_model_folder(path, write_model, report) as folder:
        yield folder


@dataclass(frozen=True)
class Training:
    """How a model was trained: its events, how they were split, its items."""

    stored: dict[str, Any]
    """Contents of training.json."""
    catalogue: Catalogue
    folder: Path
    """The model folder."""

    @property
    def facts(self) -> dict[str, Any]:
        """Digest, folder and counts of the events."""
        facts: dict[str, Any] = self.stored["training_data"]
        return facts

    @cached_property
    def data(self) -> RecDataSettings:
        """How the events were read and split."""
        return override(RecDataSettings(), self.stored["settings"]["data"], str(self.folder / TRAINING), "data.")

    @property
    def has_source(self) -> bool:
        """Whether the events can be found again. A DataFrame cannot, unless its events were saved with the model."""
        return self.facts.get("folder") is not None or (self.folder / EVENTS).is_file()

    def dataset(self, report: Callable[[str], None] = lambda message: None) -> Dataset:
        """The events of training: saved with the model, from the cache, or read again. They must not have changed."""
        if (self.folder / EVENTS).is_file():
            saved = Dataset(Histories.load(self.folder / EVENTS), self.catalogue, Users.load(self.folder / USERS))
            if saved.digest in (self.facts["digest"], self.facts.get("grown_digest")):
                return saved
        prepared = self.facts.get("folder")
        if prepared is None:
            raise FileNotFoundError(
                "the model was trained on a DataFrame that is not saved with it: give events with --data"
            )
        try:
            if Path(prepared).is_dir():
                dataset = open_dataset(Path(prepared))
            else:
                dataset = prepare_dataset(self.data.recipe(), self.data.cache, report=report)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"the training events are gone ({error}): give events with --data") from error
        if dataset.digest != self.facts["digest"]:
            raise ValueError("the training events are gone or have changed: give events with --data")
        return dataset

    def other_dataset(
        self, source: Any, report: Callable[[str], None] = lambda message: None, everyone: bool = False
    ) -> Dataset:
        """Other events, read in the same way, with the item rows of the model.

        They need no feature columns: the model already has the features of its items.

        Args:
            source: a file, a folder or a DataFrame.
            everyone: keep users and items with few events, which training would have dropped.
        """
        recipe = replace(self.data.recipe(), source=None, features=(), items=None, item_vectors=None)
        if everyone:
            recipe = replace(recipe, min_user=1, min_item=1)
        other = read_other(recipe, source, self.data.cache, report, any_length=everyone)
        return other if other.digest == self.facts["digest"] else reindex_items(other, self.catalogue)


def read_other(
    recipe: EventRecipe,
    source: Any,
    cache: Path | None = None,
    report: Callable[[str], None] = lambda message: None,
    any_length: bool = True,
) -> Dataset:
    """The events of a file, a folder or a DataFrame, by a recipe without a source."""
    if isinstance(source, (str, Path)):
        return prepare_dataset(replace(recipe, source=str(source)), cache, report=report, any_length=any_length)
    return make_dataset(recipe, source, any_length=any_length)


def training_of(folder: Path) -> Training:
    """Read how the model of a folder was trained."""
    path = folder / TRAINING
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {TRAINING}, which says what the model was trained on")
    return Training(read_json(path), Catalogue.load(folder / ITEMS), folder)


def check_replaceable(folder: Path) -> None:
    """Refuse to replace anything but a saved recommender: other files in the folder would be lost."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give a folder")
    ours = {"config.json", "README.md", TRAINING, ITEMS, USERS, EVENTS, MANIFEST}
    others = [path.name for path in folder.glob("*") if path.name not in ours and not path.match("model*.safetensors*")]
    if others:
        raise ValueError(f"{folder} holds {min(others)}, which is no part of a recommender: give a new folder")
