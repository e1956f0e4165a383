"""Train a recommender on a log, as `prism train rec` does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from prism.overrides import override
from prism.recommend.events.dataset import Dataset
from prism.recommend.events.recipe import make_dataset, prepare_dataset
from prism.recommend.events.tables import Columns
from prism.recommend.settings import preset
from prism.recommend.task import train_rec
from prism.train.run import check_folder


def fit(
    log: Any, out: Path, preset_name: str | None, columns: Columns, settings: dict[str, Any]
) -> tuple[Path, Dataset, str]:
    """Train, and return the model's folder, the prepared log and the device it was trained on."""
    data = settings.get("data", {})
    if "source" in data:
        raise ValueError("data.source is what fit is given first: leave it out of data")
    named_columns = {name: value for name, value in asdict(columns).items() if value != getattr(Columns, name)}
    for name in named_columns.keys() & data.keys():
        raise ValueError(
            f"fit is given {name}={named_columns[name]!r} and data[{name!r}]={data[name]!r}: give one of them"
        )
    named = isinstance(log, (str, Path))
    data = {**data, **named_columns, **({"source": str(log)} if named else {})}
    chosen = override(preset(preset_name), {**settings, "data": data, "out": str(out)}, "fit")
    check_folder(chosen.out, chosen.resume)
    recipe = chosen.data.recipe()
    prepared = prepare_dataset(recipe, chosen.data.cache) if named else make_dataset(recipe, log)
    outcome = train_rec(chosen, prepared)
    if outcome.model is None:
        raise ValueError(f"training was stopped after step {outcome.step}, before there was a model")
    return outcome.model, prepared, chosen.device
