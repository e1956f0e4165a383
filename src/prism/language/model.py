"""Build a language model from settings, or settings from a saved language model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from prism import rules
from prism.files import read_json
from prism.language.settings import DataSettings, ModelSettings, Settings, preset
from prism.language.tokens import Manifest
from prism.models import PrismConfig, PrismForCausalLM
from prism.models.loading import check_kind
from prism.nn.pattern import LayerSpec, format_layers, parse_layers
from prism.rules.description import options_of
from prism.train.model import drawn_start, rule_options

BYTES = 512
"""Largest vocabulary that counts as bytes."""
Builder = Callable[[ModelSettings, int, int], nn.Module]
"""(settings, vocabulary size, end token) → a `PrismForCausalLM`, or a model called as `model(input_ids=…, reset=…,
use_cache=False).logits`."""


def build_model(settings: ModelSettings, vocab_size: int, end: int) -> nn.Module:
    """A `PrismForCausalLM`; `end` is its begin, end and padding token.

    A new PRISM starts with drawn weights, and has SiLU as output gate, if tokens are bytes: one byte says too little about
    what follows for a start that recalls, and without that start a sigmoid is no better (docs/claims.md).
    """
    options = rule_options(settings)
    if vocab_size <= BYTES and settings.weights is None:
        options = drawn_start(options, settings.layers, gate_by="silu")
    config = PrismConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        num_heads=settings.num_heads,
        layers=settings.layers,
        num_hidden_layers=settings.num_hidden_layers,
        rule_options=options,
        intermediate_size=settings.intermediate_size,
        tie_word_embeddings=settings.tie_word_embeddings,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        norm_eps=1e-6 if settings.norm_eps is None else settings.norm_eps,
    )
    model = PrismForCausalLM(config)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def started_from(settings: Settings, given: Collection[str] = (), model_folder: Path | None = None) -> Settings:
    """The settings with `init` replaced by what it stands for: the model's layers, sizes, weights and tokenizer.

    A model setting that says otherwise is refused: one that differs from its preset, and any that is in `given`.

    Args:
        given: names of model settings that the user gave, which may have the values of the preset.
        model_folder: the model of the run that `init` is; the settings keep the run, as this folder may be temporary.
            None: `init` is the model's folder.
    """
    folder = settings.init
    if folder is None:
        return settings
    if not folder.is_dir():
        raise FileNotFoundError(f"init is {folder}, but there is no such model folder")
    files = model_folder or folder
    check_kind(PrismForCausalLM, files)
    config = PrismConfig.from_pretrained(files)
    _check_model_settings(settings, given, config)
    model = replace(
        settings.model,
        layers=format_layers(config.layer_plan),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_heads=config.num_heads,
        head_dim=None,
        options=(),
        vocab_size=config.vocab_size,
        intermediate_size=config.intermediate_size,
        tie_word_embeddings=config.tie_word_embeddings,
        norm_eps=config.norm_eps,
        weights=folder,
    )
    return replace(settings, init=None, model=model, data=_with_tokenizer(settings.data, folder, files))


def _check_model_settings(settings: Settings, given: Collection[str], config: PrismConfig) -> None:
    """Refuse model settings that say otherwise than the model in `init`."""
    ours, start, plan = settings.model, preset(settings.preset or "tiny").model, config.layer_plan
    names = [field.name for field in fields(ours) if field.name != "gradient_checkpointing"]
    for name in names:
        value = getattr(ours, name)
        if value is None or (value == getattr(start, name) and name not in given):
            continue
        there: Any = format_layers(plan)
        if name == "layers":
            wanted = parse_layers(value, len(plan))
            same = [layer.rule for layer in wanted] == [layer.rule for layer in plan]
            same = same and all(_has(layer, more.options) for layer, more in zip(plan, wanted, strict=True))
        elif name in ("head_dim", "options"):
            only = replace(ours, layers=there, **{"head_dim": None, "options": (), name: value})
            chosen = rule_options(only)
            same = all(_has(layer, chosen.get(layer.rule, {})) for layer in plan)
        else:
            there = settings.init if name == "weights" else getattr(config, name)
            same = value.resolve() == there.resolve() if isinstance(value, Path) else value == there
        if not same:
            shown = " ".join(value) if isinstance(value, tuple) else value
            flag = f"--model.{name.replace('_', '-')}"
            raise ValueError(
                f"model.{name} is {shown}, but the model in {settings.init} has {there}: leave out {flag}, or train a new "
                "model without --init"
            )


def _has(layer: LayerSpec, options: dict[str, Any]) -> bool:
    """Whether a layer has these options, as its own or by default."""
    all_options = {option.name: option.default for option in options_of(rules.get(layer.rule))} | layer.options
    return all(all_options.get(name) == value for name, value in options.items())


def _with_tokenizer(data: DataSettings, folder: Path, files: Path) -> DataSettings:
    """The data with the tokenizer of a model or run folder, unless they have another one than the default.

    Args:
        files: the folder of the model.
    """
    definition, about = folder / "tokenizer.json", files / "tokenizer_config.json"
    if data.tokenizer != DataSettings().tokenizer or not definition.is_file():
        return data
    end = read_json(about).get("eos_token") if about.is_file() else None
    end = end.get("content") if isinstance(end, dict) else end
    return replace(data, tokenizer=str(definition), end_token=data.end_token or end)


def vocabulary(settings: ModelSettings, manifest: Manifest) -> int:
    """Rows of the embedding: `vocab_size`, or the tokenizer's size rounded up to a multiple of 64 (faster on GPUs)."""
    if settings.vocab_size is None:
        return -(-manifest.vocab_size // 64) * 64
    if settings.vocab_size < manifest.vocab_size:
        raise ValueError(
            f"model.vocab_size is {settings.vocab_size}, but the tokenizer has {manifest.vocab_size} tokens: "
            "omit model.vocab_size or make it at least that"
        )
    return settings.vocab_size
