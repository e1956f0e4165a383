"""Rule options from settings, and initial weights: random from a seed, or read from safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from prism import rules
from prism.nn.parameters import assign
from prism.nn.pattern import parse_layers
from prism.overrides import read_toml_value
from prism.train.settings import StackSettings


def rule_options(settings: StackSettings) -> dict[str, dict[str, Any]]:
    """Options by rule: `head_dim` for rules with a configurable head size, then the entries of `options`."""
    used = {layer.rule for layer in parse_layers(settings.layers)}
    chosen: dict[str, dict[str, Any]] = {}
    for rule in sorted(used) if settings.head_dim is not None else ():
        accepted = rules.get(rule).option_names()
        sizes: dict[str, Any] = {
            name: settings.head_dim for name in ("key_dim", "value_dim", "head_dim") if name in accepted
        }
        if sizes:
            chosen[rule] = sizes
    for option in settings.options:
        place, equals, value = option.partition("=")
        rule, dot, name = place.partition(".")
        if not (equals and dot and rule and name):
            raise ValueError(f"model.options has {option!r}: write rule.option=value, for example prism.steps=3")
        if rule not in used:
            raise ValueError(f"model.options has {option!r}, but model.layers uses only {', '.join(sorted(used))}")
        chosen.setdefault(rule, {})[name] = read_toml_value(value)
    return chosen


def drawn_start(options: dict[str, dict[str, Any]], layers: str, **more: Any) -> dict[str, dict[str, Any]]:
    """Options by rule, with start="drawn" and those of `more` for PRISM where nothing else was chosen."""
    of_rule = options.get("prism", {})
    presets = [
        {**of_rule, **layer.options}.get("preset", "lm") for layer in parse_layers(layers) if layer.rule == "prism"
    ]
    if presets and set(presets) == {"lm"}:  # the preset `paper` has no such option
        return {**options, "prism": {"start": "drawn", **more, **of_rule}}
    return options


def check_stack(settings: StackSettings) -> None:
    """Raise an error for an unknown rule or a malformed option, before any data is read."""
    for layer in parse_layers(settings.layers):
        rules.get(layer.rule)
    rule_options(settings)


def initialize(model: nn.Module, seed: int, weights: dict[str, Tensor] | None = None) -> None:
    """Initialise a model from a seed, the same on every device and sharding, or with the given weights."""
    from prism.models.compat import forget_initialised

    forget_initialised(model)
    torch.manual_seed(seed)
    model.init_weights()  # type: ignore[operator]  # transformers models have it
    if weights is not None:
        _assign_weights(model, weights)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of all in a folder. Pickles are refused: opening one can run code."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not path.exists():
        raise FileNotFoundError(f"there are no weights at {path}")
    if not files or files[0].suffix != ".safetensors":
        raise ValueError(
            f"{path} has no safetensors file: pickled weights (.pt, .pth, .bin, .ckpt) can run code when opened and are not "
            "loaded; convert them with safetensors.torch.save_file"
        )
    return {name: value for file in files for name, value in _read_safetensors(file).items()}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except Exception as error:  # safetensors raises its own SafetensorError
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    return tensors


def _assign_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into all parameters of a model, once every name and shape is known to match."""
    for name, parameter in model.named_parameters():
        if name not in weights:
            raise ValueError(f"model.weights has no {name}: the weights are of a different model")
        if weights[name].shape != parameter.shape:
            raise ValueError(
                f"model.weights has {name} of shape {list(weights[name].shape)}, the model expects "
                f"{list(parameter.shape)}: the weights are of a different model or vocabulary"
            )
    for name, parameter in model.named_parameters():
        assign(parameter, weights[name])
