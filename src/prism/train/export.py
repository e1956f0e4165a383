"""A checkpoint as one folder that transformers opens: config.json, model.safetensors, tokenizer.json, README.md."""

from __future__ import annotations

from pathlib import Path

import torch

from prism.data.files import commit_folder, fresh_folder, read_json, remove_folder
from prism.data.tokenizer import load_tokenizer
from prism.train import tensors
from prism.train.card import model_card
from prism.train.checkpoint import Checkpoint
from prism.train.distributed import World
from prism.train.log import read_log
from prism.train.model import Builder, build_model
from prism.train.run import CONFIG, stored_settings


def export(run: Path, checkpoint: Checkpoint, out: Path, build: Builder = build_model) -> Path:
    """Write the model of a checkpoint, gathered from however many shards it has, to `out`, replacing what is there."""
    from prism.models.quiet import without_progress_bars

    settings = stored_settings(run)
    if settings is None:
        raise ValueError(f"{run} is not a run folder: it has no {CONFIG}")
    stored = read_json(run / CONFIG)
    tokenizer = load_tokenizer(run / "tokenizer.json", settings.data.end_token)
    model = build(settings.model, stored["identity"]["model.vocab_size"], tokenizer.end)
    tensors.load(checkpoint.tensors, model, None, World(torch.device("cpu")))

    partial = fresh_folder(out.with_name(f".{out.name}.partial"))
    with without_progress_bars():
        model.save_pretrained(partial)  # type: ignore[operator]
    _save_tokenizer(run / "tokenizer.json", tokenizer.end_token, partial)
    records = [record for record in read_log(run / "log.jsonl") if record["step"] <= checkpoint.state["step"]]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    card = model_card(run.resolve().name, settings, stored["training_data"], checkpoint.state, records, parameters)
    (partial / "README.md").write_text(card, encoding="utf-8")
    if out.exists():
        remove_folder(out)
    commit_folder(partial, out)
    return out


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
