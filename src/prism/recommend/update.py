"""Continue a trained recommender with new events, users and items: `prism train rec --update` and `Recommender.update`.

An update is a run in a folder of its own, which stops and resumes like any other. It starts from a checkpoint of step 0:

- weights: those of the old model, with rows for new items and new values of features (prism/models/grow.py). Old items have
  exactly the scores that they had;
- optimizer: the state of the old run, with zeros for new rows (without its run folder: no state);
- events: the old log and the new events as one log, split as before, in the run's folder `events`.

A run that resumes reads log and checkpoint. The new events and the base are read again only to be compared: others are refused.

An epoch goes through the samples with targets that the model has not learned from, and through `replay` times as many others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays
from torch import Tensor, nn

from prism.files import not_there, write_atomically
from prism.messages import say
from prism.models.loading import is_run, open_weights
from prism.overrides import override, to_plain
from prism.recommend.events import Dataset, Samples, open_dataset, prepare_dataset
from prism.recommend.events.merge import merge
from prism.recommend.events.recipe import make_dataset, parquet_parts
from prism.recommend.model import PrismForRecommendation
from prism.recommend.new_items import with_vectors
from prism.recommend.resize import grow, padded
from prism.recommend.saved import Training, model_folder, training_of
from prism.recommend.settings import RecSettings
from prism.train import tensors
from prism.train.checkpoint import Checkpoints, checkpoint_names, chosen_by, find_newest_good
from prism.train.distributed import World
from prism.train.model import read_weights
from prism.train.order import ReplayOrder
from prism.train.run import open_run, stored_config
from prism.train.task import Task

EPOCHS, RATE = 0.5, 1.0
"""Defaults of an update: parts of the epochs and of the learning rate of the training that it continues."""
LOG, LEARNED = "events", "learned.safetensors"
"""In the run's folder: the whole log, and how much of it the old model had learned from."""
NEW_EVENTS, BASE = "new events", "base"
"""Entries of the run's identity: digests of what the update was started with."""
_PREFIX = "recommender."
"""The recommender within the module that is trained."""


@dataclass(frozen=True)
class Update:
    """What an update starts from."""

    dataset: Dataset
    """The whole log: old and new events."""
    learned: np.ndarray
    """Events of each user that the model has learned from, int64 `[U]`."""
    base: Path
    marks: dict[str, str] = field(default_factory=dict)
    """What the run's identity says of the new events and the base."""


def update_settings(base: Path) -> RecSettings:
    """The settings of a run or saved recommender as defaults of its update, without a source of events."""
    with model_folder(base) as folder:
        stored = training_of(folder).stored
    settings = override(RecSettings(), stored["settings"], str(base))
    trained = settings.epochs
    if settings.steps:
        trained = settings.steps * settings.batch.sequences / stored["training_data"]["samples"]
    return replace(
        settings,
        out=RecSettings.out,
        update=base.resolve(),
        steps=0,
        epochs=EPOCHS * trained,
        replay=RecSettings.replay,
        optimizer=replace(settings.optimizer, lr=RATE * settings.optimizer.lr),
        model=replace(settings.model, weights=None),
        data=replace(settings.data, source=None, valid_from=None, test_from=None),
    )


def prepare_update(
    settings: RecSettings, base: Path, new: Dataset | None = None, known: Dataset | None = None
) -> Update:
    """The whole log of an update: from its run folder if it has begun, else from the old log and the new events.

    Args:
        new: the new events, instead of those that `settings.data` names.
        known: events that may be those of the old training.
    """
    log, before = settings.out / LOG, stored_config(settings.out)
    if _run_of(base).resolve() == settings.out.resolve():
        raise ValueError(f"out is {settings.out}, the run to update: give another run folder with --out")
    if log.is_dir() and before is not None:
        learned = load_arrays(settings.out / LEARNED)["learned"]
        return Update(open_dataset(log, settings.data.verify), learned, base, _marks(settings, base, new, before))
    with model_folder(base, say) as folder:
        training = training_of(folder)
        _check_same_model(training, settings)
        old = old_events(training, folder, known)
    trained_on = training.data.split_of(old.histories).train.lengths
    new = read_new_events(settings) if new is None else new
    merged = merge(old, new, settings.data.duplicates == "drop")
    learned = np.zeros(len(merged.dataset.users), dtype=np.int64)
    learned[: len(trained_on)] = trained_on
    whole = replace(merged.dataset, folder=log)
    marks = {NEW_EVENTS: new.digest, BASE: weights_digest(base)}
    return Update(whole, np.minimum(learned, merged.first_new), base, marks)


def _marks(settings: RecSettings, base: Path, new: Dataset | None, before: dict[str, Any]) -> dict[str, str]:
    """The marks of a run that resumes, to be compared with those that it was started with.

    What is gone, or is not named, is taken to be the same.

    Args:
        before: the run's config.json.
    """
    started, marks = before["settings"], {name: before["identity"][name] for name in (NEW_EVENTS, BASE)}
    there = Path(before["started_in"]) / (started["update"] or "")
    same_place = _run_of(base).resolve() == _run_of(there).resolve()
    if not base.is_dir() and same_place:
        say(f"{base} is gone: the update resumes from what it was")
    elif (mark := weights_digest(base)) != marks[BASE] and same_place:
        say(f"{base} has changed since this update started: it resumes from what {base} was")
    else:
        marks[BASE] = mark
    if new is None and settings.data.source is not None:
        try:
            new = read_new_events(settings)
        except FileNotFoundError as error:
            named = to_plain(settings.data)
            if any(named[name] != started["data"].get(name) for name in ("source", "items", "users", "item_vectors")):
                raise
            say(f"{error}: the update resumes with the events that it was started with")
    return marks if new is None else {**marks, NEW_EVENTS: new.digest}


def old_events(training: Training, folder: Path, known: Dataset | None) -> Dataset:
    """The events of training with the items of the model folder, which may have got more since, and their vectors."""
    old, catalogue = known, training.catalogue
    if old is None or old.digest != training.facts["digest"]:
        try:
            old = training.dataset(say)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"an update needs the events of training, and they are gone: save the recommender with its histories ({error})"
            ) from error
    if catalogue.vector_marks:
        catalogue = with_vectors(open_weights(PrismForRecommendation, folder, "cpu"), catalogue)
    kept = {name: value for name in ("origin", "dates") if (value := training.facts.get(name)) is not None}
    return Dataset(old.histories, catalogue, old.users, {**old.manifest, **kept})


def read_new_events(settings: RecSettings, events: Any = None, in_memory: Mapping[str, Any] | None = None) -> Dataset:
    """New events, of users and items with any number of events.

    Args:
        events: a DataFrame, instead of the file that `settings.data` names.
        in_memory: tables of items and users that are not files.
    """
    recipe = replace(settings.data.recipe(), min_user=1, min_item=1)
    source = events
    if recipe.source is not None:
        source = Path(recipe.source).expanduser()
        if source.is_dir() and parquet_parts(source):
            return prepare_dataset(recipe, settings.data.cache, report=say, any_length=True)
        if source.is_dir():
            return open_dataset(source)
        if not source.is_file():
            raise FileNotFoundError(not_there(recipe.source))
    elif events is None:
        raise ValueError("an update needs new events: name them with data.source (--data.source FILE)")
    from prism.recommend.events.features import Tables  # imports polars

    return make_dataset(recipe, source, Tables(**(in_memory or {})), any_length=True)


def _check_same_model(training: Training, settings: RecSettings) -> None:
    before = to_plain(override(RecSettings(), {"model": training.stored["settings"]["model"]}, "the model").model)
    for name, value in to_plain(settings.model).items():
        if name in ("layers", "hidden_size", "num_hidden_layers", "num_heads", "head_dim", "options", "time_gaps",
                    "intermediate_size") and value != before[name]:  # fmt: skip
            raise ValueError(
                f"model.{name} is {value!r}, but the model to update has {before[name]!r}: an update keeps the model"
            )


def update_order(samples: Samples, learned: np.ndarray, replay: float, seed: int) -> ReplayOrder:
    """All samples with targets that have not been learned from, and `replay` times as many others (or all of them)."""
    is_new = samples.reaching(learned)
    new, old = np.flatnonzero(is_new), np.flatnonzero(~is_new)
    if not len(new):
        raise ValueError(
            "the new events add nothing to learn from: they are all held out to validate and test (with global_time, set "
            "data.valid_from and data.test_from), or already known"
        )
    return ReplayOrder(new, old, min(round(replay * len(new)), len(old)), seed)


def start_update(task: Task, update: Update) -> None:
    """Write the log and the checkpoint of step 0, unless the run has them."""
    world = World(torch.device("cpu"))
    with open_run(task, world) as folder:
        if not (folder / LOG).is_dir():
            write_atomically(folder / LEARNED, save_arrays({"learned": update.learned}))
            update.dataset.save(folder / LOG)
        if not checkpoint_names(folder / "checkpoints"):
            held = start_tensors(task, update.base)
            tensors.seed(task.settings.seed + 1)
            state = {"step": 0, "skipped": 0, "skipped_in_a_row": 0, "best": None, "stale": 0, "processes": 1}
            checkpoints = Checkpoints(folder / "checkpoints", task.settings.checkpoint.keep, world)
            checkpoints.save(held, tensors.capture(world.device), {**state, "torch": torch.__version__})


def start_tensors(task: Task, base: Path) -> dict[str, Tensor]:
    """Weights and optimizer state of the old model, grown to the shapes of the new one."""
    learner = task.build()
    task.initialize(learner)  # for counts and features; all weights are replaced
    weights, moments = old_tensors(base)
    new = tensors.model_tensors(learner)
    parameters = dict(learner.named_parameters())
    config: Any = learner.get_submodule(_PREFIX[:-1]).config
    held = {}
    for name, value in new.items():
        short = name.removeprefix(f"model.{_PREFIX}")
        if name.removeprefix("model.") in parameters:
            if short not in weights:
                raise ValueError(f"the model to update has no {short}: it was trained with other features")
            held[name] = grow(short, weights[short], value, config)
        else:
            held[name] = value
    return held | _grown_moments(moments, weights, parameters)


def old_tensors(base: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of a run or a model folder by name, and the state of the optimizers: empty without a run."""
    base = _run_of(base)
    if not is_run(base):
        return read_weights(base), {}
    folder = _trained(base)
    weights = {name.removeprefix(_PREFIX): value for name, value in tensors.read(folder).items()}
    return weights, tensors.read(folder, "optimizer")


def weights_digest(base: Path) -> str:
    """One hash of the weights that `old_tensors` returns, wherever they are."""
    base = _run_of(base)
    weights = tensors.read(_trained(base)) if is_run(base) else read_weights(base)
    found = hashlib.sha256()
    for name, value in sorted((name.removeprefix(_PREFIX), value) for name, value in weights.items()):
        array = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        found.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        found.update(array.data)
    return found.hexdigest()


def _trained(run: Path) -> Path:
    """The tensors of the checkpoint of a run that its model is made of."""
    newest = find_newest_good(run / "checkpoints", say)
    if newest is None:
        raise ValueError(f"{run} is a run without a good checkpoint: resume it until it has one")
    return chosen_by(newest).tensors


def _run_of(base: Path) -> Path:
    """The run that a model folder is part of; other folders are returned as they are."""
    return base.parent if base.name == "model" and is_run(base.parent) else base


def _grown_moments(
    moments: dict[str, Tensor], weights: dict[str, Tensor], parameters: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The optimizers' state: moments get zero rows where their weights grew, step counts stay."""
    grown = {}
    for name, value in moments.items():
        parameter = name.rpartition(".")[0]
        old = weights[parameter.removeprefix(_PREFIX)]
        is_moment = value.shape == old.shape
        grown[f"optimizer.{name}"] = padded(value, parameters[parameter].shape) if is_moment else value
    return grown
