"""Recommender: a trained model with its items and users, for recommendations and for streams of events.

Design choices
- A user is a history and nothing else: a user who was not in training is a sequence like any other.
- A user without events, or one that is not known, gets the most popular items, and the result says so. Items that the model
  does not know are dropped. Both with a warning.
- A state is a value: `observe` returns a new one and does not change the old one, so a service can keep, copy and retry.
- A stream has read every event since its start. It recommends the same items as reading the whole history again, and leaves
  out the same ones: states know which items their users had.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prism.files import seal_weights, whole_folder, write_json
from prism.models.loading import fingerprint_mismatch, open_weights, without_progress_bars
from prism.recommend.arguments import check_count, check_list, check_share, one_of
from prism.recommend.events import Catalogue, Dataset, EventRecipe, Histories, Users
from prism.recommend.events.columns import AUTO, Columns
from prism.recommend.events.dataset import EVENTS, ITEMS, TRAINING, USERS, reindex_items
from prism.recommend.events.ids import as_list
from prism.recommend.filters import Excluded, allowed_items, unwanted_items
from prism.recommend.frames import Source, free_name
from prism.recommend.growing import Growing
from prism.recommend.model import PrismForRecommendation
from prism.recommend.reading import Unknown, advance, as_histories, encode, initial_state
from prism.recommend.rerank import diverse_items
from prism.recommend.results import Recommendations
from prism.recommend.saved import Training, check_replaceable, model_folder, read_other, training_of
from prism.recommend.states import UserStates
from prism.recommend.top_items import similar_rows


class Recommender(Growing):
    """A model, its items, and optionally users with their histories.

    Args:
        model: stays on its device; it is put into evaluation mode.
        catalogue: the items' ids.
        users, histories: the users that `recommend(users=…)` knows, and their events.
        training: how the model was trained; saved with it, so that it can be evaluated.
        source: how DataFrames of results look. None: as the events of training.
    """

    def __init__(
        self,
        model: PrismForRecommendation,
        catalogue: Catalogue,
        users: Users | None = None,
        histories: Histories | None = None,
        training: Training | None = None,
        source: Source | None = None,
    ) -> None:
        if len(catalogue) != model.config.num_items:
            raise ValueError(f"the catalogue has {len(catalogue)} items, but the model {model.config.num_items}")
        if users is not None and histories is not None and len(users) != len(histories):
            raise ValueError(f"users and histories must have the same length, got {len(users)} and {len(histories)}")
        if users is not None and histories is not None and histories.profiles is None:
            histories = replace(histories, profiles=users.profiles)
        self.model, self.catalogue, self.users, self.histories = model.eval(), catalogue, users, histories
        self._training = training
        self.source = source or Source.of({} if training is None else training.facts.get("origin", {}))
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

        for name, given in {"features": features, "user_features": user_features}.items():
            check_list(name, given)
        columns = Columns(user, item, time, tuple(features), tuple(user_features))
        tables = {"items": items, "users": users, "item_vectors": item_vectors}
        if out is not None:
            return cls.load(*fit(events, Path(out), preset, columns, settings, tables))
        with tempfile.TemporaryDirectory() as folder:
            return cls.load(*fit(events, Path(folder) / "run", preset, columns, settings, tables))

    @classmethod
    def load(cls, folder: Path | str, data: Any = None, device: str = "auto") -> Recommender:
        """Load a folder that `save` or `prism train rec` wrote, or a run folder.

        Args:
            data: events of the users that `recommend(users=…)` should know: a polars or pandas DataFrame, a path as in
                `data.source`, or a Dataset. None: the events saved with the model, or else those it was trained on, opened
                when first needed.
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
            dataset = training.other_dataset(data, everyone=True)
        else:
            dataset = read_other(EventRecipe(), data)
        if list(dataset.catalogue.items) != list(catalogue.items):
            dataset = reindex_items(dataset, catalogue)
        source = Source.of(dataset.manifest["origin"]) if "origin" in dataset.manifest else None
        return cls(model, catalogue, dataset.users, dataset.histories, training, source)._from(folder)

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
        check_replaceable(folder)
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
        allowed: Iterable[Any] | None = None,
        where: Mapping[str, Any] | None = None,
        diversify: float = 0.0,
        times: Sequence[Sequence[float]] | None = None,
        max_length: int | None = None,
        unknown: Unknown = "skip",
        user_features: Mapping[str, Sequence[Any]] | None = None,
    ) -> Recommendations:
        """The k best next items for users, for sequences of items, or for states.

        Args:
            of: states, sequences (a list of lists) or users (a list of ids); or give one of them by name:
            users: ids of users. One who is not known gets the most popular items, and `fallback` says so.
            sequences: histories as lists of item ids. An empty history gets the most popular items.
            states: states from `start` or `observe`.
            filter_seen: leave out items of the history.
            exclude: for each row, ids of items to leave out (a list, or one id).
            allowed: ids of the only items to choose from, for all rows.
            where: features that an item must have, such as `{"genre": "Drama", "year": [1994, 1995]}`: one of the values of
                every feature. Features are the columns named in training.
            diversify: from 0 (best scores) to 1 (items as unlike each other as possible); see rerank.py.
            times: times of the sequences' events, for models with time gaps. Events stay in the order given; an event that
                is earlier than the previous one counts as simultaneous.
            max_length: number of last events to read. None: as many as in training. 0: all, as a stream does.
            unknown: with items and users that the model does not know, warn ("skip") or refuse them ("error").
            user_features: with sequences, what is known of their users, `{"country": ["fr", None]}`: an entry for each
                sequence. Known users have the features of training, states those they were started with.
        """
        users, sequences, states = one_of(of, users, sequences, states)
        check_count("k", k)
        check_share("diversify", diversify)
        names: Sequence[Any] | None = None
        if states is not None:
            self._check(states)
            hidden, events, seen = states.hidden, states.events, states.seen.excluded()
        else:
            if users is not None:
                names, histories = self._histories(users, unknown)
            else:
                assert sequences is not None
                histories = as_histories(sequences, times, self.catalogue, unknown)
                if user_features is not None:
                    histories = replace(histories, profiles=self._profiles(user_features, len(histories)))
            hidden, events = self.encode(histories, max_length), torch.from_numpy(histories.lengths).to(self.device)
            seen = Excluded(len(histories), np.repeat(np.arange(len(histories)), histories.lengths), histories.items)
        excluded = unwanted_items(self.catalogue, len(hidden), exclude)
        excluded = excluded | seen if filter_seen else excluded
        choice = allowed_items(self.catalogue, allowed, where)
        rows, scores = diverse_items(self.model, hidden, events, excluded, k, choice, diversify)
        return Recommendations(rows, scores, self.catalogue, names, (events == 0).cpu().numpy(), self.source)

    @torch.no_grad()
    def similar_items(
        self,
        items: Any,
        k: int = 10,
        *,
        allowed: Iterable[Any] | None = None,
        where: Mapping[str, Any] | None = None,
    ) -> Recommendations:
        """The k most similar items to an item, or to each of several, by the cosine of the items' vectors.

        Args:
            items: an id, or a list of ids; an unknown one is refused.
            allowed, where: as in `recommend`.
        """
        check_count("k", k)
        asked = self.catalogue.index(as_list(items))
        rows, scores = similar_rows(self.model, asked, k, allowed_items(self.catalogue, allowed, where))
        columns = (self.source.item, free_name("similar", (self.source.item,)))
        names = self.source.items(self.catalogue.names(asked))
        return Recommendations(rows, scores, self.catalogue, names, None, self.source, columns)

    @torch.no_grad()
    def encode(self, histories: Histories, max_length: int | None = None) -> Tensor:
        """The model's output after each user's last event, `[U, D]` (zeros without events); see `model.scores`.

        Args:
            max_length: as in `recommend`.
        """
        return encode(self.model, histories, max_length)

    def start(self, users: int, user_features: Mapping[str, Sequence[Any]] | None = None) -> UserStates:
        """States of new users, before their first event. `resume` gives those of known users.

        Args:
            user_features: as in `recommend`.
        """
        check_count("users", users)
        if user_features is None:
            return self._blank.index_select([0] * users)
        return initial_state(self.model, self._profiles(user_features, users))

    def _profiles(self, user_features: Mapping[str, Sequence[Any]], users: int) -> np.ndarray:
        if self.users is None or not self.users.features:
            raise ValueError("user_features was given, but the model was trained without features of users")
        return self.users.codes(user_features, users)

    @torch.no_grad()
    def resume(self, users: Sequence[Any]) -> UserStates:
        """States of known users after all their events; an unknown one is refused."""
        check_list("users", users)
        _, histories = self._histories(users, "error")
        check_count("the number of users", len(histories))
        profiles = histories.profiles
        states = self.start(len(histories)) if profiles is None else initial_state(self.model, profiles)
        return advance(self.model, states, histories)

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
        check_list("items", items)
        if len(items) != len(states):
            raise ValueError(f"items must have one entry for each of the {len(states)} users, got {len(items)}")
        return advance(self.model, states, as_histories(items, times, self.catalogue, unknown))

    def known_users(self) -> Sequence[Any]:
        """The ids of all users that `recommend(users=…)` knows, as in the events."""
        self._open_histories()
        return () if self.users is None else self.source.users(self.users.ids)

    @cached_property
    def _blank(self) -> UserStates:
        return initial_state(self.model)

    def _histories(self, users: Sequence[Any], unknown: Unknown) -> tuple[Sequence[Any], Histories]:
        """The users' ids, as in the events, and their histories; empty ones for unknown users."""
        self._open_histories()
        if self.histories is None or self.users is None:
            raise ValueError("the model has no histories: give sequences, or load it with data (events of the users)")
        asked = as_list(users)
        rows = self.users.rows(asked)
        if unknown == "error":
            self.users.index(asked)
        elif strangers := [name for name, row in zip(asked, rows, strict=True) if row < 0]:
            shown = ", ".join(map(repr, strangers[:5])) + (" …" if len(strangers) > 5 else "")
            warnings.warn(
                f"{len(strangers)} of {len(asked)} users are unknown and get the most popular items: {shown}"
                f"{self.users.if_unknown}",
                stacklevel=4,
            )
        known = self.histories.take(np.maximum(rows, 0))
        names = [self.users.ids[row] if row >= 0 else name for name, row in zip(asked, rows, strict=True)]
        return self.source.users(names), known.head(np.where(rows < 0, 0, known.lengths))

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
