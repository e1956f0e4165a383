"""Recommender: a trained model with its items and users, for recommendations and for streams of events.

Design choices
- A user is a history and nothing else: a user who was not in training is a sequence like any other.
- A user without events gets the most popular items. Items that the model does not know are dropped, with a warning.
- A state is a value: `observe` returns a new one and does not change the old one, so a service can keep, copy and retry.
- A stream has read every event since its start. It recommends the same items as reading the whole history again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from prism.recommend.events import Catalogue, Dataset, EventRecipe, Histories, Users, prepare_dataset
from prism.recommend.events.columns import AUTO, Columns
from prism.recommend.events.dataset import EVENTS, ITEMS, TRAINING, USERS, reindex_items
from prism.recommend.growing import Growing
from prism.recommend.reading import Unknown, advance, as_histories, as_list, encode, initial_state, is_list
from prism.recommend.results import Recommendations, best_items
from prism.recommend.saved import Training, model_folder, training_of
from prism.recommend.states import UserStates


class Recommender(Growing):
    """A model, its items, and optionally users with their histories.

    Args:
        model: stays on its device; it is put into evaluation mode.
        catalogue: the items' ids.
        users, histories: the users that `recommend(users=…)` knows, and their events.
        training: how the model was trained; saved with it, so that it can be evaluated.
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
            raise ValueError(f"the catalogue has {len(catalogue)} items, but the model {model.config.num_items}")
        if users is not None and histories is not None and len(users) != len(histories):
            raise ValueError(f"users and histories must have the same length, got {len(users)} and {len(histories)}")
        if users is not None and histories is not None and histories.profiles is None:
            histories = replace(histories, profiles=users.profiles)
        self.model, self.catalogue, self.users, self.histories = model.eval(), catalogue, users, histories
        self._training = training
        self._folder: Path | None = None

    @property
    def device(self) -> torch.device:
        return self.model.item_counts.device

    @classmethod
    def fit(
        cls,
        events: Any,
        /,
        out: Path | str | None = None,
        preset: str | None = None,
        *,
        user: str = AUTO,
        item: str = AUTO,
        time: str | None = AUTO,
        features: Sequence[str] = (),
        user_features: Sequence[str] = (),
        items: Any = None,
        users: Any = None,
        item_vectors: Any = None,
        **settings: Any,
    ) -> Recommender:
        """Train a recommender on events: `Recommender.fit(df, user="customer", item="product", time="when", epochs=20)`.

        Args:
            events: a polars or pandas DataFrame, a file of events, or a folder of prepared events (as `data.source`).
                Positional only.
            out: run folder, with checkpoints to resume from. None: no run folder is kept.
            preset: "prism", "sasrec" or "hstu".
            user, item, time: names of the columns; "auto" finds the usual names. `time=None`: the events are already in
                order. The same as `data={"user": …}`, and `--data.user` on the command line.
            features: names of columns that describe the item: a category, a list of genres, a vector.
            user_features: names of columns that describe the user.
            items, users: tables with one row per item or user (a frame or a file), for features that the events lack.
            item_vectors: vectors of the items, such as those of texts or images: a mapping from ids, a frame with the id and
                the vector, or an array (or .npy or .safetensors file) with one row for each row of `items`.
            settings: the settings of `prism train rec`, with sections as dicts:
                `epochs=10, model={"layers": "prism*2"}, data={"length": 100}`.
        """
        from prism.recommend.task import fit  # the trainer is imported only for training

        columns = Columns(user, item, time, tuple(features), tuple(user_features))
        tables = {"items": items, "users": users, "item_vectors": item_vectors}
        if out is not None:
            return cls.load(*fit(events, Path(out), preset, columns, settings, tables))
        with tempfile.TemporaryDirectory() as folder:
            return cls.load(*fit(events, Path(folder) / "run", preset, columns, settings, tables))

    @classmethod
    def load(cls, folder: Path | str, data: Dataset | Path | str | None = None, device: str = "auto") -> Recommender:
        """Load a folder that `save` or `prism train rec` wrote, or a run folder.

        Args:
            data: events of the users that `recommend(users=…)` should know: a Dataset, or a path as in `data.source`.
                None: the events saved with the model, or else those it was trained on, opened when first needed.
        """
        with model_folder(Path(folder)) as opened:
            model = open_weights(PrismForRecommendation, opened, device)
            if not (opened / ITEMS).is_file():
                raise FileNotFoundError(f"{opened} has no {ITEMS}, which holds the ids of the items")
            catalogue = Catalogue.load(opened / ITEMS)
            users = Users.load(opened / USERS) if (opened / USERS).is_file() else None
            histories = Histories.load(opened / EVENTS) if (opened / EVENTS).is_file() else None
            training = training_of(opened) if (opened / TRAINING).is_file() else None
        if data is None:
            return cls(model, catalogue, users, histories, training)._from(folder)
        if isinstance(data, Dataset):
            dataset = data
        elif training is not None:
            dataset = training.other_dataset(str(data), everyone=True)
        else:
            dataset = prepare_dataset(EventRecipe(source=str(data)))
        if list(dataset.catalogue.items) != list(catalogue.items):
            dataset = reindex_items(dataset, catalogue)
        return cls(model, catalogue, dataset.users, dataset.histories, training)._from(folder)

    def _from(self, folder: Path | str) -> Recommender:
        """Note the folder that this was loaded from: an update continues the state of its optimizer."""
        self._folder = Path(folder).resolve()
        return self

    def save(self, folder: Path | str, histories: bool = True) -> None:
        """Write a folder that `load` opens; it may replace a saved recommender.

        Args:
            histories: save the users' events too.
        """
        folder = Path(folder).resolve()
        _check_replaceable(folder)
        if histories:
            self._open_histories()
        with whole_folder(folder, "the recommender") as partial:
            with without_progress_bars():
                self.model.save_pretrained(partial)
            self.catalogue.save(partial / ITEMS)
            if self.users is not None:
                self.users.save(partial / USERS)
            if self.histories is not None and histories:
                self.histories.save(partial / EVENTS)
            if self._training is not None:
                write_json(partial / TRAINING, self._stored(self._training, histories))
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
        user_features: Mapping[str, Sequence[Any]] | None = None,
    ) -> Recommendations:
        """The k best next items for users, for sequences of items, or for states.

        Args:
            of: states, sequences (a list of lists) or users (a list of ids); or give one of them by name:
            users: ids of known users.
            sequences: histories as lists of item ids. An empty history gets the most popular items.
            states: states from `start` or `observe`.
            filter_seen: leave out items of the history. A state does not remember items: use `exclude` with states.
            exclude: for each row, ids of items to leave out (a list, or one id).
            times: times of the sequences' events, for models with time gaps. Events stay in the order given; an event that
                is earlier than the previous one counts as simultaneous.
            max_length: number of last events to read. None: as many as in training. 0: all, as a stream does.
            unknown: drop items that the model does not know, with a warning ("skip"), or refuse them ("error").
            user_features: with sequences, what is known of their users, `{"country": ["fr", None]}`: an entry for each
                sequence. Known users have the features of training, states those they were started with.
        """
        if sum(given is not None for given in (of, users, sequences, states)) != 1:
            raise ValueError("give exactly one of users, sequences and states")
        if isinstance(of, UserStates):
            states = of
        elif of is not None and is_list(of) and len(of) and all(is_list(one) for one in of):
            sequences = of
        elif of is not None:
            users = of
        for name, value in (("users", users), ("sequences", sequences)):
            _check_list(name, value)
        if sequences is not None:
            _check_lists(sequences)
        _check_count("k", k)
        if states is not None:
            self._check(states)
            return self._best(states.hidden, states.events, self._excluded(len(states), None, exclude), k)
        if users is not None:
            histories = self._histories(users)
        else:
            assert sequences is not None
            histories = as_histories(sequences, times, self.catalogue, unknown)
            if user_features is not None:
                histories = replace(histories, profiles=self._profiles(user_features, len(histories)))
        seen = histories if filter_seen else None
        hidden = self.encode(histories, max_length)
        events = torch.from_numpy(histories.lengths).to(self.device)
        return self._best(hidden, events, self._excluded(len(histories), seen, exclude), k)

    @torch.no_grad()
    def encode(self, histories: Histories, max_length: int | None = None) -> Tensor:
        """The model's output after each user's last event, `[U, D]` (zeros without events); see `model.scores`.

        Args:
            max_length: as in `recommend`.
        """
        return encode(self.model, histories, max_length)

    def start(self, users: int, user_features: Mapping[str, Sequence[Any]] | None = None) -> UserStates:
        """States of new users, before their first event.

        Args:
            user_features: as in `recommend`.
        """
        _check_count("users", users)
        if user_features is None:
            return self._blank.index_select([0] * users)
        return initial_state(self.model, self._profiles(user_features, users))

    def _profiles(self, user_features: Mapping[str, Sequence[Any]], users: int) -> np.ndarray:
        if self.users is None or not self.users.features:
            raise ValueError("user_features was given, but the model was trained without features of users")
        return self.users.codes(user_features, users)

    @torch.no_grad()
    def observe(
        self,
        states: UserStates,
        items: Sequence[Any],
        times: Sequence[Any] | None = None,
        unknown: Unknown = "skip",
    ) -> UserStates:
        """The states after these events; the given states do not change.

        Args:
            items: one entry for each user: an item's id, a list of ids, or None for no event.
            times: of the same shape, for models with time gaps.
            unknown: as in `recommend`.
        """
        self._check(states)
        _check_list("items", items)
        if len(items) != len(states):
            raise ValueError(f"items must have one entry for each of the {len(states)} users, got {len(items)}")
        return advance(self.model, states, as_histories(items, times, self.catalogue, unknown))

    @cached_property
    def _blank(self) -> UserStates:
        return initial_state(self.model)

    def _best(self, hidden: Tensor, events: Tensor, excluded: list[np.ndarray], k: int) -> Recommendations:
        return best_items(self.model, self.catalogue, hidden, events, excluded, k)

    def _excluded(
        self, users: int, seen: Histories | None, exclude: Sequence[Sequence[Any]] | None
    ) -> list[np.ndarray]:
        """For each user the rows of items to leave out."""
        rows = [np.zeros(0, dtype=np.int64) if seen is None else seen.user(user)[0] for user in range(users)]
        if exclude is None:
            return rows
        if len(exclude) != users:
            raise ValueError(f"exclude must have one list of items for each of the {users} rows, got {len(exclude)}")
        unwanted = [self.catalogue.index(as_list(items), unknown="skip") for items in exclude]
        return [np.concatenate(pair) for pair in zip(rows, unwanted, strict=True)]

    def _histories(self, users: Sequence[Any]) -> Histories:
        self._open_histories()
        if self.histories is None or self.users is None:
            raise ValueError("the model has no histories: give sequences, or load it with data (events of the users)")
        return self.histories.take(self.users.index(users))

    def _open_histories(self) -> None:
        """Open the events of training, if no histories were saved with the model."""
        if self.histories is None and self._training is not None and self._training.has_source:
            dataset = self._training.dataset()
            self.users, self.histories = dataset.users, dataset.histories

    def _check(self, states: UserStates) -> None:
        if not isinstance(states, UserStates):
            raise ValueError(f"states must be UserStates from start or observe, got {type(states).__name__}")
        if states.model != self._blank.model:
            what = fingerprint_mismatch(states.model, self.model)
            raise ValueError(f"the states were made by a model with {what}: this model cannot use them")
        if states.device != self.device:
            raise ValueError(
                f"the states are on {states.device}, the model on {self.device}: move them with .to(device)"
            )

    def __repr__(self) -> str:
        known = "" if self.users is None else f", {len(self.users):,} users"
        return f"Recommender({len(self.catalogue):,} items{known}, layers={self.model.config.layers!r}, {self.device})"


def _check_count(name: str, given: Any) -> None:
    if not isinstance(given, Integral) or isinstance(given, bool) or given < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {given!r}")


def _check_list(name: str, given: Any) -> None:
    if given is not None and not is_list(given):
        raise ValueError(f"{name} must be a list, got {given!r}")


def _check_lists(sequences: Sequence[Any]) -> None:
    """Refuse a flat list of items: it would be taken as one-item histories of many users."""
    for one in sequences:
        if one is not None and not is_list(one):
            raise ValueError(
                f"sequences must be a list of histories, each a list of items, got the item {one!r}: "
                "write sequences=[[…]] for one history"
            )


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace anything but a saved recommender: other files in the folder would be lost."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give a folder")
    ours = {"config.json", "README.md", TRAINING, ITEMS, USERS, EVENTS, MANIFEST}
    others = [path.name for path in folder.glob("*") if path.name not in ours and not path.match("model*.safetensors*")]
    if others:
        raise ValueError(f"{folder} holds {min(others)}, which is no part of a recommender: give a new folder")
