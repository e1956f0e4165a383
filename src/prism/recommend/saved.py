"""What a recommender's folder says about its training, and the log it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prism.files import read_json
from prism.models.loading import is_run
from prism.overrides import override
from prism.recommend.events import Catalogue, Histories, Prepared, Users, open_prepared, prepare_log
from prism.recommend.events.dataset import EVENTS, ITEMS, TRAINING, USERS, translate
from prism.recommend.events.recipe import RecDataSettings


@contextmanager
def model_folder(path: Path, report: Callable[[str], None] = lambda message: None) -> Iterator[Path]:
    """The folder to open for a path: the path itself, or for a run the model it would export now."""
    if not is_run(path):
        yield path
        return
    from prism.recommend.export import write_model  # only a run needs the trainer
    from prism.train import export

    with export.resolve_model_folder(path, write_model, report) as folder:
        yield folder


@dataclass(frozen=True)
class Training:
    """How the log was read and split, the facts that this gave, the model's own items, and where all of it is."""

    data: RecDataSettings
    facts: dict[str, Any]
    catalogue: Catalogue
    stored: dict[str, Any]
    """As the file has it."""
    folder: Path

    @property
    def named(self) -> bool:
        """Whether the log can be found again: a DataFrame cannot, unless its events were saved with the model."""
        return self.facts.get("folder") is not None or (self.folder / EVENTS).is_file()

    def log(self, report: Callable[[str], None] = lambda message: None) -> Prepared:
        """The log of training: saved with the model, from where it was prepared, or read again. It must not have changed."""
        if (self.folder / EVENTS).is_file():
            saved = Prepared(Histories.load(self.folder / EVENTS), self.catalogue, Users.load(self.folder / USERS))
            if saved.digest == self.facts["digest"]:
                return saved
        kept = self.facts.get("folder")
        if kept is None:
            raise FileNotFoundError(
                "the model was trained on a DataFrame that is not saved with it: give a log with --data"
            )
        try:
            if Path(kept).is_dir():
                log = open_prepared(Path(kept))
            else:
                log = prepare_log(self.data.recipe(), self.data.cache, report=report)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"the log of training is gone ({error}): give one with --data") from error
        if log.digest != self.facts["digest"]:
            raise ValueError("the log of training is gone or has changed since: give one with --data")
        return log

    def other_log(
        self, source: str, report: Callable[[str], None] = lambda message: None, everyone: bool = False
    ) -> Prepared:
        """Another log, read in the same way, in the terms of the model's items.

        It needs no columns of features: what is known of an item, the model knows.

        Args:
            everyone: keep users and items that training would have left out for their few events.
        """
        recipe = replace(self.data.recipe(), source=source, features=())
        if everyone:
            recipe = replace(recipe, min_user=1, min_item=1)
        other = prepare_log(recipe, self.data.cache, report=report)
        return other if other.digest == self.facts["digest"] else translate(other, self.catalogue)


def training_of(folder: Path) -> Training:
    """Of a model folder that `prism train rec` wrote."""
    path = folder / TRAINING
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {TRAINING}, which says what the model was trained on")
    stored = read_json(path)
    data = override(RecDataSettings(), stored["settings"]["data"], str(path), "data.")
    return Training(data, stored["training_data"], Catalogue.load(folder / ITEMS), stored, folder)
