"""A recommender in use.

Design choices
- Users are nothing but their histories: one who was not in the log is a sequence like any other.
- A user without events gets the most popular items. Items that the model does not know are left out, with a warning.
- A state is a value: `observe` returns a new one and leaves the old one as it was, so that a service can keep, copy, retry.
- A stream has read everything since its start. What it recommends is what reading the whole history anew would recommend.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prism.files import MANIFEST, seal_weights, whole_folder, write_json
from prism.models import PrismForRecommendation
from prism.models.loading import fingerprint_mismatch, open_weights, without_progress_bars
from prism.recommend.events import Catalogue, Histories, LogRecipe, Prepared, Users, prepare_log
from prism.recommend.events.dataset import EVENTS, ITEMS, TRAINING, USERS, translate
from prism.recommend.events.tables import AUTO, Columns
from prism.recommend.reading import Unknown, as_histories, blank, encode, is_several, read_on, several
from prism.recommend.results import Recommendations, best_items
from prism.recommend.saved import Training, model_folder, training_of
from prism.recommend.states import UserStates


class Recommender:
    """A model, the items it knows, and perhaps the users it has met.

    Args:
        model: moved nowhere; it is put into evaluation mode.
        catalogue: the items' ids.
        users, histories: whom `recommend(users=…)` can be asked for, and what they did.
        training: where the model comes from; saved with it, so that it can be evaluated.
    """

    def __init__(
        self,
        model: PrismForRecommendation,
        catalogue: Catalogue,
        users: Users | None = None,
        histories: Histories | None = None,
        training: Training | None = None,
    ) -> None:
        if len(catalogue) != model.config.num_items:
            raise ValueError(f"the catalogue has {len(catalogue)} items, the model {model.config.num_items}")
        if users is not None and histories is not None and len(users) != len(histories):
            raise ValueError(f"there are {len(users)} users, but histories of {len(histories)}")
        self.model, self.catalogue, self.users, self.histories = model.eval(), catalogue, users, histories
        self._training = training

    @property
    def device(self) -> torch.device:
        return self.model.item_counts.device

    @classmethod
    def fit(
        cls,
        log: Any,
        /,
        out: Path | str | None = None,
        preset: str | None = None,
        *,
        user: str = AUTO,
        item: str = AUTO,
        time: str | None = AUTO,
        features: Sequence[str] = (),
        **settings: Any,
    ) -> Recommender:
        """Train a recommender on events: `Recommender.fit(df, user="customer", item="product", time="when", epochs=20)`.

        Args:
            log: a polars or pandas DataFrame, or a path as `data.source` takes it: a file of events or a prepared folder.
                Positional only.
            out: the run's folder, with checkpoints to resume from; None: no run folder is kept.
            preset: "prism", "sasrec" or "hstu".
            user, item, time: names of these columns; "auto" finds the usual names. `time=None`: the events are already in
                order. The same as `data={"user": …}`, and `--data.user` on the command line.
            features: names of columns that describe the item, such as a category.
            settings: those of `prism train rec`, with sections as dicts:
                `epochs=10, model={"layers": "prism*2"}, data={"length": 100}`.
        """
        from prism.recommend.fit import fit

        columns = Columns(user, item, time, tuple(features))
        if out is not None:
            return cls.load(*fit(log, Path(out), preset, columns, settings))
        with tempfile.TemporaryDirectory() as folder:
            return cls.load(*fit(log, Path(folder) / "run", preset, columns, settings))

    @classmethod
    def load(cls, folder: Path | str, data: Prepared | Path | str | None = None, device: str = "auto") -> Recommender:
        """A model's folder, as `save` or `prism train rec` wrote it, or a run.

        Args:
            data: a log with users' histories, as `data.source` takes it or prepared: whom `recommend(users=…)` knows. Unless
                given, those saved with the model, or those it was trained on, if they are asked for and still there.
        """
        with model_folder(Path(folder)) as opened:
            model = open_weights(PrismForRecommendation, opened, device)
            if not (opened / ITEMS).is_file():
                raise FileNotFoundError(f"{opened} has no {ITEMS}, which names the items")
            catalogue = Catalogue.load(opened / ITEMS)
            users = Users.load(opened / USERS) if (opened / USERS).is_file() else None
            histories = Histories.load(opened / EVENTS) if (opened / EVENTS).is_file() else None
            training = training_of(opened) if (opened / TRAINING).is_file() else None
        if data is None:
            return cls(model, catalogue, users, histories, training)
        if isinstance(data, Prepared):
            log = data
        elif training is not None:
            log = training.other_log(str(data), everyone=True)
        else:
            log = prepare_log(LogRecipe(source=str(data)))
        log = log if list(log.catalogue.items) == list(catalogue.items) else translate(log, catalogue)
        return cls(model, catalogue, log.users, log.histories, training)

    def save(self, folder: Path | str, histories: bool = True) -> None:
        """A folder that `load` opens, replacing a recommender that is there; without `histories` no user's events are in it."""
        folder = Path(folder).resolve()
        _check_replaceable(folder)
        if histories:
            self._meet()
        with whole_folder(folder, "the recommender") as partial:
            with without_progress_bars():
                self.model.save_pretrained(partial)
            self.catalogue.save(partial / ITEMS)
            if self.users is not None:
                self.users.save(partial / USERS)
            if self.histories is not None and histories:
                self.histories.save(partial / EVENTS)
            if self._training is not None:
                write_json(partial / TRAINING, self._training.stored)
            seal_weights(partial)

    @torch.no_grad()
    def recommend(
        self,
        of: Sequence[Any] | UserStates | None = None,
        k: int = 10,
        filter_seen: bool = True,
        *,
        users: Sequence[Any] | None = None,
        sequences: Sequence[Sequence[Any]] | None = None,
        states: UserStates | None = None,
        exclude: Sequence[Sequence[Any]] | None = None,
        times: Sequence[Sequence[float]] | None = None,
        max_length: int | None = None,
        unknown: Unknown = "skip",
    ) -> Recommendations:
        """The k items that are expected most, for users of the log, for sequences of items, or for states.

        Args:
            of: states, sequences (a list of lists) or users (a list of ids); or say which by name:
            users: ids of users of the log.
            sequences: histories of anyone, as items' ids. An empty one gets the most popular items.
            states: what `observe` returned.
            filter_seen: leave out what is in the history. A state does not remember items: there, `exclude` says which.
            exclude: for each row, ids of items that are not wanted.
            times: of the sequences' events, for models that were trained with time gaps. Events stay in the order given; one
                that is earlier than the one before it counts as at the same time.
            max_length: how many of the last events are read: as many as the model was trained on unless given; 0 is all of
                them, as a stream reads them.
            unknown: sequences' items that the model does not know are left out with a warning, or "error".
        """
        if sum(given is not None for given in (of, users, sequences, states)) != 1:
            raise ValueError("give users, sequences or states: one of them")
        if isinstance(of, UserStates):
            states = of
        elif of is not None and is_several(of) and len(of) and all(is_several(one) for one in of):
            sequences = of
        elif of is not None:
            users = of
        for name, value in (("users", users), ("sequences", sequences)):
            _check_list(name, value)
        if sequences is not None:
            _check_lists(sequences)
        if not isinstance(k, Integral) or k < 1:
            raise ValueError(f"k must be at least 1 and whole, got {k!r}")
        if states is not None:
            self._check(states)
            return self._best(states.hidden, states.events, self._excluded(len(states), None, exclude), k)
        if users is not None:
            histories = self._histories(users)
        else:
            assert sequences is not None
            histories = as_histories(sequences, times, self.catalogue, unknown)
        seen = histories if filter_seen else None
        hidden = self.encode(histories, max_length)
        events = torch.from_numpy(histories.lengths).to(self.device)
        return self._best(hidden, events, self._excluded(len(histories), seen, exclude), k)

    @torch.no_grad()
    def encode(self, histories: Histories, max_length: int | None = None) -> Tensor:
        """`[U, D]`: what is expected after each user's last event (zeros without events), to be scored by the model.

        Args:
            max_length: as in `recommend`.
        """
        return encode(self.model, histories, max_length)

    def start(self, users: int) -> UserStates:
        """States of this many users who have done nothing yet."""
        if users < 1:
            raise ValueError(f"users must be at least 1, got {users}")
        return self._blank.index_select([0] * users)

    @torch.no_grad()
    def observe(
        self,
        states: UserStates,
        items: Sequence[Any],
        times: Sequence[Any] | None = None,
        unknown: Unknown = "skip",
    ) -> UserStates:
        """The states after these events; those given stay as they are.

        Args:
            items: one entry for each user: an item's id, a list of ids, or None for no event.
            times: of the same shape, for models that were trained with time gaps.
            unknown: items that the model does not know are left out with a warning, or "error".
        """
        self._check(states)
        _check_list("items", items)
        if len(items) != len(states):
            raise ValueError(f"items must have one entry for each of the {len(states)} users, got {len(items)}")
        return read_on(self.model, states, as_histories(items, times, self.catalogue, unknown))

    @cached_property
    def _blank(self) -> UserStates:
        return blank(self.model)

    def _best(self, hidden: Tensor, events: Tensor, excluded: list[np.ndarray], k: int) -> Recommendations:
        return best_items(self.model, self.catalogue, hidden, events, excluded, k)

    def _excluded(
        self, users: int, seen: Histories | None, exclude: Sequence[Sequence[Any]] | None
    ) -> list[np.ndarray]:
        """For each user the rows of items that are not to be recommended."""
        rows = [np.zeros(0, dtype=np.int64) if seen is None else seen.user(user)[0] for user in range(users)]
        if exclude is None:
            return rows
        if len(exclude) != users:
            raise ValueError(f"exclude must have one list of items for each of {users}, got {len(exclude)}")
        unwanted = [self.catalogue.index(several(items), unknown="skip") for items in exclude]
        return [np.concatenate(pair) for pair in zip(rows, unwanted, strict=True)]

    def _histories(self, users: Sequence[Any]) -> Histories:
        self._meet()
        if self.histories is None or self.users is None:
            raise ValueError("no histories came with the model: give sequences, or load it with a log as data")
        return self.histories.take(self.users.index(users))

    def _meet(self) -> None:
        """Open the log of training, if no histories came with the model."""
        if self.histories is None and self._training is not None and self._training.named:
            log = self._training.log()
            self.users, self.histories = log.users, log.histories

    def _check(self, states: UserStates) -> None:
        if not isinstance(states, UserStates):
            raise ValueError(f"states must be what start or observe returned, got {type(states).__name__}")
        if states.model != self._blank.model:
            what = fingerprint_mismatch(states.model, self.model)
            raise ValueError(f"the states were made by a model with {what}: they mean nothing to this one")
        if states.device != self.device:
            raise ValueError(f"the states are on {states.device}, the model on {self.device}: move them with .to")

    def __repr__(self) -> str:
        met = "" if self.users is None else f", {len(self.users):,} users"
        return f"Recommender({len(self.catalogue):,} items{met}, layers={self.model.config.layers!r}, {self.device})"


def _check_list(name: str, given: Any) -> None:
    if given is not None and not is_several(given):
        raise ValueError(f"{name} must be a list, got {given!r}")


def _check_lists(sequences: Sequence[Any]) -> None:
    """Refuse a flat list of items: it would be read as one-item histories of many users."""
    for one in sequences:
        if one is not None and not is_several(one):
            raise ValueError(
                f"sequences must be a list of histories, each a list of items, got the item {one!r} in it: "
                "write sequences=[[…]] for one history"
            )


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace anything but a saved recommender: what else is in a folder would be lost."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give a folder")
    ours = {"config.json", "README.md", TRAINING, ITEMS, USERS, EVENTS, MANIFEST}
    others = [path.name for path in folder.glob("*") if path.name not in ours and not path.match("model*.safetensors*")]
    if others:
        raise ValueError(f"{folder} holds {min(others)}, which is no part of a recommender: give a folder of its own")
