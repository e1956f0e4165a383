"""A recommender's checkpoint as a folder that serves: config.json, model.safetensors, items.json, users.json, README.md,
and training.json, which says what it was trained on and how that was split."""

from __future__ import annotations

from pathlib import Path

import torch

from prism.data.interactions import Catalogue
from prism.data.interactions.prepared import ITEMS, USERS
from prism.files import json_bytes
from prism.models.loading import without_progress_bars
from prism.models.losses import full_softmax
from prism.train import tensors
from prism.train.checkpoint import Checkpoint
from prism.train.distributed import World
from prism.train.rec_card import model_card
from prism.train.rec_model import Learner, build_recommender
from prism.train.rec_settings import RecSettings
from prism.train.run import read_log, stored_config, stored_settings

TRAINING = "training.json"


def write_model(run: Path, checkpoint: Checkpoint, folder: Path) -> None:
    settings, stored = stored_settings(run, "rec", RecSettings()), stored_config(run)
    assert settings is not None and stored is not None
    learner = Learner(build_recommender(settings, Catalogue.load(run / ITEMS)), full_softmax)
    tensors.load(checkpoint.tensors, learner, None, World(torch.device("cpu")))
    with without_progress_bars():
        learner.recommender.save_pretrained(folder)
    for name in (ITEMS, USERS):
        (folder / name).write_bytes((run / name).read_bytes())
    state = checkpoint.state
    trained = {key: stored[key] for key in ("settings", "training_data")}
    (folder / TRAINING).write_bytes(json_bytes({**trained, "step": state["step"]}))
    records = [record for record in read_log(run / "log.jsonl") if record["step"] <= state["step"]]
    parameters = sum(parameter.numel() for parameter in learner.parameters())
    card = model_card(run.resolve().name, settings, stored["training_data"], state, records, parameters)
    (folder / "README.md").write_text(card, encoding="utf-8")
