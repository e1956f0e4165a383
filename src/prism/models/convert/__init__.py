"""Convert Gated DeltaNet language models of flash-linear-attention and transformers to ours, and ours to fla's.

Our rule `prism` with one write per token *is* the Gated DeltaNet layer, so the logits are the same. With more writes and
γ = 0 they are still the same, and training continues as PRISM.

Everything is checked before anything is written. Tensors are read, joined and written one at a time: no more than one output
file's tensors are in memory. Weights are safetensors; pickles are never opened.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prism.files import check_target, read_json, seal_weights, whole_folder, write_json
from prism.messages import did_you_mean, say
from prism.models.config import PrismConfig
from prism.models.convert import fla, qwen
from prism.models.convert.entries import Entry, can_become_prism, delta_options, on_meta, rules_of
from prism.models.convert.shards import Weights, write_shards
from prism.models.language import PrismForCausalLM
from prism.nn.parameters import gates, initial_weights

RULES = ("gated_delta", "prism")
TARGETS = ("prism", "fla")
FREE_OPTIONS = (
    "steps",
    "solver",
    "residual",
    "gain",
    "nonlinearity",
    "keys",
    "shared_key",
    "rank",
    "key_rank",
    "up_std",
    "scaling",
)
"""Options of PRISM that describe its further writes; the others are the source's."""
KNOWN = {fla.MODEL_TYPE: fla.config_from, **dict.fromkeys(qwen.MODEL_TYPES, qwen.config_from)}
COPIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*.model",
    "*.tiktoken",
    "LICENSE*",
)
"""Files of a model folder that do not depend on the model's layout."""

Report = Callable[[int, int], None]


class Step(NamedTuple):
    """How some tensors of the source become tensors of the target."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    make: Callable[[list[Tensor]], list[Tensor]]


class Plan(NamedTuple):
    """A checked conversion: the new config.json, the tensors to make, and PRISM's new ones with their dtypes."""

    config: dict[str, Any]
    steps: list[Step]
    fresh: Iterator[tuple[str, Tensor]]


def convert_model(
    source: str | Path,
    output: str | Path,
    *,
    to: str = "prism",
    rule: str | None = None,
    options: dict[str, Any] | None = None,
    force: bool = False,
    seed: int = 0,
    norm_eps: float | None = None,
    shard_bytes: int = 4_000_000_000,
    report: Report | None = None,
) -> Path:
    """Convert the model in a folder, with its tokenizer, and return the new folder.

    Args:
        source: a folder with config.json and safetensors: a Gated DeltaNet language model of flash-linear-attention or
            transformers, or a model of ours.
        output: the folder to write. It appears complete or not at all.
        to: `"prism"` for a `PrismForCausalLM`, `"fla"` for flash-linear-attention's `GatedDeltaNetForCausalLM`.
        rule: the rule of the Gated DeltaNet layers in a model of ours: `"gated_delta"` (default), or `"prism"`, whose
            further writes start with γ = 0. A model of ours can be converted from `gated_delta` to `prism`.
        options: options of the rule `prism` that describe its further writes: `{"steps": 3, "rank": 16}`.
        force: whether to replace an existing model folder.
        seed: seed of PRISM's new weights.
        norm_eps: epsilon of all norms of a model for `"fla"`, which has one number for them; ours has one between layers
            and one in the rule (1e-6 and 1e-5 by default). Another epsilon changes the logits a little. None: the
            model's, if they are equal.
        shard_bytes: size of the weight files.
        report: called with the bytes written so far and in all.
    """
    source, output = Path(source), Path(output)
    extra = _checked(to, rule, dict(options or {}))
    if norm_eps is not None:
        _check_norm_eps(to, norm_eps)
    config = _config_of(source)
    _check_output(source, output, force)
    weights = Weights(source)
    kind = config["model_type"]
    if to == "fla":
        plan = _to_fla(source, config, weights, norm_eps)
    elif kind == "prism":
        plan = _to_prism_rule(source, rule, extra, weights, seed)
    else:
        model = on_meta(_our_config(source, config, rule or "gated_delta", extra))
        plan = _into_ours(model, _entries(kind, model, config), weights, seed)
    with whole_folder(output, "the model") as folder:
        write_shards(folder, _tensors(plan, weights, report), shard_bytes)
        _copy_files(source, folder)
        write_json(folder / "config.json", plan.config)
        if to == "prism":
            seal_weights(folder)
    return output


def _checked(to: str, rule: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the rule, or a ValueError for arguments that do not fit each other."""
    if to not in TARGETS:
        raise ValueError(f"to must be one of {', '.join(TARGETS)}, got {to!r}")
    if rule is not None and rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    if to == "fla" and rule is not None:
        raise ValueError(f"rule is {rule!r}, but a model of flash-linear-attention has its own: leave it out")
    if options and rule != "prism":
        raise ValueError(f"{next(iter(options))} is an option of PRISM's further writes: it needs rule 'prism'")
    for name in options:
        if name not in FREE_OPTIONS:
            raise ValueError(
                f"option {name!r} cannot be chosen{did_you_mean(name, FREE_OPTIONS)}: a converted layer computes what it "
                f"did, and only its further writes are free ({', '.join(FREE_OPTIONS)})"
            )
    if options.get("scaling") == "fixed":
        raise ValueError("scaling is 'fixed', but γ starts at 0 and must be trained: use 'channel' or 'head'")
    return options


def _check_norm_eps(to: str, norm_eps: float) -> None:
    if to != "fla":
        raise ValueError(
            f"norm_eps is {norm_eps:g}, but a model of ours keeps its epsilons: leave it out, or use to='fla'"
        )
    if not 0 < norm_eps < 1:
        raise ValueError(f"norm_eps must be above 0 and below 1, for example 1e-5, got {norm_eps:g}")


def _config_of(folder: Path) -> dict[str, Any]:
    """The contents of a folder's config.json; ValueError if no model in it can be converted."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no model folder {folder}")
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no model folder: it has no config.json")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} is damaged: it does not hold a configuration")
    if "settings" in config:
        raise ValueError(
            f"{folder} is a training run: convert the model in {folder / 'model'} (`prism export` writes it)"
        )
    kind = config.get("model_type")
    qwen.refuse_relatives(kind)
    if kind != "prism" and kind not in KNOWN:
        raise ValueError(
            f"model_type is {kind!r} in {path}, but only Gated DeltaNet models can be converted: "
            f"{', '.join([*KNOWN, 'prism'])}"
        )
    return config


def _check_output(source: Path, output: Path, force: bool) -> None:
    check_target(output, folder=True)
    here, there = source.resolve(), output.resolve()
    if here == there or there in here.parents:
        raise ValueError(f"output {output} is the source {source} or contains it: give another folder")
    if not output.exists():
        return
    if not force:
        raise ValueError(f"{output} exists already: give another folder, or --force to replace it")
    if any(output.iterdir()) and not (output / "config.json").is_file():
        raise ValueError(f"{output} is not replaced, because it is no model folder (it has no config.json)")


def _our_config(source: Path, config: dict[str, Any], rule: str, extra: dict[str, Any]) -> PrismConfig:
    if rule == "prism":
        extra = {"steps": 2, **extra}
    try:
        return KNOWN[config["model_type"]](config, rule, extra)
    except (KeyError, TypeError, AttributeError) as error:  # a field that is missing, or of another type
        raise ValueError(f"{source / 'config.json'} is not complete: {type(error).__name__} {error}") from error


def _entries(kind: str, model: PrismForCausalLM, config: dict[str, Any]) -> list[Entry]:
    if kind == fla.MODEL_TYPE:
        return fla.entries(model, fla.group_of(config)[0])
    return qwen.entries(model, config)


def _into_ours(model: PrismForCausalLM, entries: list[Entry], weights: Weights, seed: int) -> Plan:
    """The plan for a model of ours, given without weights."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    used = {name for entry in entries for name in entry.theirs}
    _check_names(used, weights, model.config.tie_word_embeddings, entries[0].theirs[0])
    for entry in entries:
        try:
            made = entry.join([weights.like(name) for name in entry.theirs]).shape
        except RuntimeError:
            made = None
        if made != shapes[entry.ours]:
            found = ", ".join(f"{name} {list(weights.like(name).shape)}" for name in entry.theirs)
            raise ValueError(
                f"{weights.folder} has tensors that do not fit its config.json: {found} for {entry.ours} "
                f"{list(shapes[entry.ours])}"
            )
    steps = [Step(entry.theirs, (entry.ours,), partial(_join, entry)) for entry in entries]
    done = {entry.ours for entry in entries}
    like = next((entry for entry in entries if entry.ours.endswith("rule.qkv.weight")), entries[0]).theirs[0]
    fresh = _fresh(model, set(shapes) - done, weights[like].dtype, seed)
    return Plan(json.loads(model.config.to_json_string()), steps, fresh)


def _join(entry: Entry, parts: list[Tensor]) -> list[Tensor]:
    return [entry.join(parts)]


def _split(entry: Entry, parts: list[Tensor]) -> list[Tensor]:
    return entry.split(parts[0])


def _check_names(used: set[str], weights: Weights, tied: bool, embedding: str) -> None:
    """Raise ValueError unless the folder holds these tensors and no others."""
    missing = sorted(used - set(weights))
    if missing:
        raise ValueError(f"{weights.folder} has no tensor {missing[0]!r}, which its config.json needs")
    head = "lm_head.weight"
    if tied and head in weights:
        if not torch.equal(weights[head], weights[embedding]):
            raise ValueError(
                f"tie_word_embeddings is true in {weights.folder}, but its {head} differs from {embedding}: correct one"
            )
        used = {*used, head}
    unused = set(weights) - used
    more = sorted(name for name in unused if not qwen.left_out(name))
    if unused and not more:
        say(f"left out: {len(unused)} tensors for pictures or further tokens, such as {min(unused)}")
    if more:
        raise ValueError(f"{weights.folder} has a tensor {more[0]!r}, for which there is no place in the new model")


@torch.no_grad()
def _fresh(model: PrismForCausalLM, names: set[str], dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Initial values of PRISM's new parameters, layer by layer. Gates are in float32."""
    exact = gates(model)
    for index, rule in enumerate(rules_of(model)):
        place = f"model.layers.{index}.mixer.rule."
        parameters = {name: p for name, p in rule.named_parameters() if place + name in names}
        if not parameters:
            continue
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + index)
            values = initial_weights(rule)
            for name, parameter in parameters.items():
                if name not in values:
                    values[name] = torch.normal(0.0, model.config.initializer_range, tuple(parameter.shape))
        for name in parameters:
            yield place + name, values[name].to(torch.float32 if place + name in exact else dtype)


def _to_prism_rule(source: Path, rule: str | None, extra: dict[str, Any], weights: Weights, seed: int) -> Plan:
    """The plan for a model of ours whose Gated DeltaNet layers become PRISM."""
    config = PrismConfig.from_pretrained(source)
    if rule != "prism":
        raise ValueError(f"{source} holds a model of ours already: give rule 'prism', or convert it to 'fla'")
    layers: list[dict[str, Any]] = []
    for index, (layer, built) in enumerate(zip(config.layer_plan, rules_of(on_meta(config)), strict=True)):
        chosen, options = layer.rule, dict(layer.options)
        if can_become_prism(built):
            # The rules' defaults may differ.
            same = {"key_dim": built.key_dim, "value_dim": built.value_dim, "gate_by": built.gate_by}
            chosen, options = "prism", delta_options("prism", {**options, **same, "steps": 2}, extra)
        elif layer.rule == "prism":
            raise ValueError(f"layer {index} of {source} is PRISM with {built.write_rank} writes already")
        layers.append({"rule": chosen, **options})
    if all(layer["rule"] != "prism" for layer in layers):
        raise ValueError(f"{source} has no gated_delta layer that could become PRISM")
    changed = {**config.to_dict(), "layers": layers, "rule_options": {}}
    model = on_meta(PrismConfig.from_dict(changed))
    kept = [name for name, _ in on_meta(config).named_parameters()]
    return _into_ours(model, [Entry(name, (name,)) for name in kept], weights, seed)


def _to_fla(source: Path, config: dict[str, Any], weights: Weights, norm_eps: float | None) -> Plan:
    if config["model_type"] != "prism":
        raise ValueError(f"{source} holds no model of ours: model_type is {config['model_type']!r} in its config.json")
    model = on_meta(PrismConfig.from_pretrained(source))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    theirs = fla.config_to(model, 1, norm_eps)  # refuses what fla does not have
    _check_names(set(shapes), weights, model.config.tie_word_embeddings, "model.embed_tokens.weight")
    for name, shape in shapes.items():
        if weights.like(name).shape != shape:
            raise ValueError(
                f"{source} has {name} of shape {list(weights.like(name).shape)}, but its config.json needs {list(shape)}"
            )
    group = fla.group_in(model, weights)
    theirs = fla.config_to(model, group, norm_eps)
    steps = [Step((entry.ours,), entry.theirs, partial(_split, entry)) for entry in fla.entries(model, group)]
    return Plan(theirs, steps, iter(()))


def _tensors(plan: Plan, weights: Weights, report: Report | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the target, one after the other."""
    total = len(plan.steps)
    for number, step in enumerate(plan.steps, 1):
        made = step.make([weights[name] for name in step.sources])
        yield from zip(step.targets, (tensor.clone() if len(made) > 1 else tensor for tensor in made), strict=True)
        if report is not None:
            report(number, total)
    yield from plan.fresh


def _copy_files(source: Path, folder: Path) -> None:
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copyfile(path, folder / path.name)


__all__ = ["convert_model"]
