"""From a log to a trained model's folder, as `prism train rec` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prism.data.interactions.prepared import Prepared, make_log, prepare_log
from prism.train.overrides import override
from prism.train.rec import train_rec
from prism.train.rec_presets import preset


def fit(log: Any, out: Path, preset_name: str | None, settings: dict[str, Any]) -> tuple[Path, Prepared, str]:
    """The folder of the model, the log as it was learned from, and the device it was trained on."""
    if "source" in settings.get("data", {}):
        raise ValueError("data.source is what fit is given first: leave it out of data")
    named = isinstance(log, (str, Path))
    data = {**settings.get("data", {}), **({"source": str(log)} if named else {})}
    chosen = override(preset(preset_name), {**settings, "data": data, "out": str(out)}, "fit")
    recipe = chosen.data.recipe()
    prepared = prepare_log(recipe, chosen.data.cache) if named else make_log(recipe, log)
    outcome = train_rec(chosen, prepared)
    if outcome.model is None:
        raise ValueError(f"training was stopped after step {outcome.step}, before there was a model")
    return outcome.model, prepared, chosen.device
