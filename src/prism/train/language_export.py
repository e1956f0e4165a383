"""A language model's checkpoint as transformers opens it: config.json, model.safetensors, tokenizer.json, README.md."""

from __future__ import annotations

from pathlib import Path

import torch

from prism.data.tokenizer import load_tokenizer
from prism.train import tensors
from prism.train.card import model_card
from prism.train.checkpoint import Checkpoint
from prism.train.distributed import World
from prism.train.model import Builder, build_model
from prism.train.run import read_log, stored_config, stored_settings
from prism.train.settings import Settings


def write_model(run: Path, checkpoint: Checkpoint, folder: Path, build: Builder = build_model) -> None:
    from prism.models.loading import without_progress_bars

    settings, stored = stored_settings(run, "lm", Settings()), stored_config(run)
    assert settings is not None and stored is not None
    tokenizer = load_tokenizer(run / "tokenizer.json", settings.data.end_token)
    model = build(settings.model, stored["identity"]["model.vocab_size"], tokenizer.end)
    tensors.load(checkpoint.tensors, model, None, World(torch.device("cpu")))
    with without_progress_bars():
        model.save_pretrained(folder)  # type: ignore[operator]  # transformers models have it
    _save_tokenizer(run / "tokenizer.json", tokenizer.end_token, folder)
    records = [record for record in read_log(run / "log.jsonl") if record["step"] <= checkpoint.state["step"]]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    card = model_card(run.resolve().name, settings, stored["training_data"], checkpoint.state, records, parameters)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _save_tokenizer(definition: Path, end_token: str, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(definition),
        bos_token=end_token,
        eos_token=end_token,
        pad_token=end_token,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.save_pretrained(folder)
