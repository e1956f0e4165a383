"""New items of a trained recommender: scored by their features, without training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prism.recommend.events import Catalogue
from prism.recommend.events.columns import KeyedColumns
from prism.recommend.learner import described
from prism.recommend.model import PrismForRecommendation
from prism.recommend.resize import grow_model

NO_FEATURES = "the model has no features of items: it scores the items that it was trained on"


def add_items(
    model: PrismForRecommendation,
    catalogue: Catalogue,
    items: Any,
    key: str,
    separator: str | None,
    origin: Mapping[str, Any] | None = None,
) -> tuple[PrismForRecommendation, Catalogue]:
    """A model and its catalogue with more items; those it had keep their rows and vectors.

    Args:
        items: a table (a frame, a mapping of columns, or a file) with the items' ids and at least one of the features of
            training; those that it lacks are unknown. Items that the catalogue has are left as they are.
        key: column of the ids, or "auto".
        separator: splits texts of features into lists.
        origin: of the events of training, as in `merge_catalogues`.
    """
    from prism.recommend.events.features import encode  # imports polars
    from prism.recommend.events.formats import column_names, pl, read_table
    from prism.recommend.events.merge import merge_catalogues
    from prism.recommend.events.values import as_table, frame_columns, ids

    catalogue = with_vectors(model, catalogue)
    known = (*catalogue.features, *catalogue.vectors)
    if not known:
        raise ValueError(f"{NO_FEATURES}; train it with features of items, or add items by `update` with their events")
    if isinstance(items, (str, Path)):
        where, path = str(items), Path(items).expanduser()
        there = column_names(path)
        wanted = KeyedColumns("item", key, tuple(name for name in known if name in there))
        table, columns, _ = read_table(path, "auto", wanted)
    else:
        where = "the table items"
        given = pl.DataFrame(dict(items)) if isinstance(items, Mapping) else items
        there = frame_columns(given, "items")
        columns = KeyedColumns("item", key, tuple(name for name in known if name in there)).found(there, where)
        table = as_table(given, columns.wanted, "items")
    if not len(table):
        raise ValueError(f"{where} is empty: there is no item in it")
    if not columns.features:
        raise ValueError(
            f"{where} has none of the columns that the model knows items by: give at least one of "
            f"{feature_names(model, catalogue)}"
        )
    names = ids(table[columns.key], where)
    distinct = names.unique(maintain_order=True)
    rows = names.replace_strict(distinct, pl.int_range(len(distinct), eager=True), return_dtype=pl.Int64).to_numpy() + 1
    found = encode({name: table[name] for name in columns.features}, rows, len(distinct) + 1, separator, where)
    for name in columns.features:
        if (name in catalogue.vectors) != (name in found.vectors):
            kind = "vectors" if name in catalogue.vectors else "values"
            raise ValueError(f"column {name!r} of {where} must hold {kind}, as in training")
    whole = merge_catalogues(catalogue, Catalogue(distinct.to_list(), found.features, found.vectors), origin)
    if len(whole) == len(catalogue):
        return model, catalogue
    features = whole.features.items()
    grown = grow_model(
        model,
        num_items=len(whole),
        item_features={name: len(feature.values) for name, feature in features if not feature.is_list},
        item_lists={name: (len(feature.values), feature.width) for name, feature in features if feature.is_list},
    )
    counts = np.concatenate([model.item_counts.cpu().numpy(), np.zeros(len(whole) - len(catalogue), dtype=np.int64)])
    grown.describe_items(counts, described(whole))
    return grown, whole


def feature_names(model: PrismForRecommendation, catalogue: Catalogue) -> str:
    """The features of a model's items, for messages: `genre (a list), photo (a vector of 64 numbers)`."""
    vectors: dict[str, int] = model.config.item_vectors
    words = [f"{name} ({'a list' if it.is_list else 'a value'})" for name, it in catalogue.features.items()]
    return ", ".join(words + [f"{name} (a vector of {size} numbers)" for name, size in vectors.items()])


def with_vectors(model: PrismForRecommendation, catalogue: Catalogue) -> Catalogue:
    """The catalogue with the vectors that were given for its items, which the model holds."""
    names = model.config.item_vectors
    vectors = {
        name: model.get_buffer(f"given_vectors_{place}").float().cpu().numpy() for place, name in enumerate(names)
    }
    return Catalogue(catalogue.items, catalogue.features, vectors)
