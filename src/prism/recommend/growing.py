"""How a recommender grows: new items by their features, and further training with new events."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from prism.models import PrismForRecommendation
from prism.recommend.events import Catalogue, Dataset, Histories, Users
from prism.recommend.events.columns import AUTO
from prism.recommend.frames import Source
from prism.recommend.saved import Training


class Growing:
    """The part of `Recommender` that makes a larger recommender of it."""

    model: PrismForRecommendation
    catalogue: Catalogue
    users: Users | None
    histories: Histories | None
    source: Source
    _training: Training | None
    _folder: Path | None

    if TYPE_CHECKING:  # what `Recommender` has

        def __init__(self, *arguments: Any) -> None: ...

        def save(self, folder: Path | str, histories: bool = True) -> None: ...

        @classmethod
        def load(cls, folder: Path | str, data: Any = None, device: str = "auto") -> Self: ...

    def add_items(self, items: Any, *, item: str = AUTO) -> Self:
        """A recommender that also has these items, scored by their features; this one does not change.

        Nothing is trained. Old items keep their scores, and states stay valid. Train with `model={"id_dropout": 0.1}` if items
        will be added: features alone then carry what is learned of an item.

        Args:
            items: a frame, a mapping of columns or a file: the ids, and one or more of the features of training. Known items
                stay as they are.
            item: column of the ids.
        """
        from prism.recommend.new_items import add_items

        training = self._training
        separator = None if training is None else training.data.list_separator
        origin = None if training is None else training.facts.get("origin")
        model, catalogue = add_items(self.model, self.catalogue, items, item, separator, origin)
        training = None if training is None else replace(training, catalogue=catalogue)
        return type(self)(model, catalogue, self.users, self.histories, training, self.source)

    def update(
        self,
        events: Any,
        /,
        out: Path | str | None = None,
        *,
        items: Any = None,
        users: Any = None,
        item_vectors: Any = None,
        **settings: Any,
    ) -> Self:
        """Train further with new events, users and items; returns the new recommender, this one does not change.

        Old items start with the scores they have, new ones with those of their features. If the recommender has its run
        folder (`fit(out=…)`, `prism train rec`), the state of the optimizer is continued too.

        Args:
            events: a frame or a file with the columns of training. New events only: the old ones are known.
            out: run folder, resumed if the update was interrupted. None: no run folder is kept.
            items, users, item_vectors: tables as in `fit`, for new items and users.
            settings: the settings of `prism train rec --update`, such as `epochs=2, replay=0.5`; the others are as in training.
        """
        from prism.recommend.task import fit_update  # the trainer is imported only for training
        from prism.recommend.update import weights_digest

        tables = {"items": items, "users": users, "item_vectors": item_vectors}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "run" if out is None else Path(out)
            base = self._folder
            if base is None or not base.exists():
                base, own = (
                    folder / ".base",
                    Path(temporary) / "base",
                )  # a hidden name: the folder still counts as empty
                if not base.exists():
                    self.save(base)
                else:  # of an update that was interrupted, perhaps of another recommender
                    self.save(own)
                    base = base if weights_digest(base) == weights_digest(own) else own
            known = None
            if self.histories is not None and self.users is not None:
                known = Dataset(self.histories, self.catalogue, self.users)
            return type(self).load(*fit_update(base, events, folder, settings, tables, known))

    def _stored(self, training: Training, histories: bool) -> dict[str, Any]:
        """What training.json says; of a recommender with added items also the digest of the events saved with them."""
        facts = training.facts
        if not histories or self.histories is None or self.users is None or facts.get("items") == len(self.catalogue):
            return training.stored
        digest = Dataset(self.histories, self.catalogue, self.users).digest
        return {**training.stored, "training_data": {**facts, "grown_digest": digest}}
