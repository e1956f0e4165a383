"""Which tensors of another library's model are which of ours: entries that join theirs to one of ours, and split it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prism.models.config import PrismConfig
from prism.models.language import PrismForCausalLM
from prism.rules.delta import GatedDelta
from prism.rules.prism import Prism
from prism.rules.rule import Rule
from prism.rules.softmax import Softmax


@dataclass(frozen=True)
class Entry:
    """One tensor of ours, and the tensors of theirs that it is made of."""

    ours: str
    theirs: tuple[str, ...]
    join: Callable[[list[Tensor]], Tensor] = lambda parts: parts[0]
    split: Callable[[Tensor], list[Tensor]] = lambda tensor: [tensor]


def refuse(field: str, value: Any, why: str) -> ValueError:
    """The error for a part of their model that ours cannot express."""
    return ValueError(f"this model cannot be converted: {field} is {value!r} in its config.json, {why}")


def delta_options(rule: str, options: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """The options of a Gated DeltaNet layer as those of `rule`, with `extra` options of PRISM.

    PRISM starts with γ = 0, so that its further writes add nothing until they are trained, and with the layer's output gate.
    """
    if rule != "prism":
        return options
    options = dict(options)
    if options.get("conv_size") == 1:  # the anchor keeps its convolution
        del options["conv_size"]
        options["qkv_conv"] = False
    return {"gate_by": "silu", **options, "step_scale": 0.0, **extra}


def our_config(
    given: dict[str, Any],
    heads: int,
    layers: Any,
    rule_options: dict[str, dict[str, Any]],
    hidden: int,
    norm_eps: float,
    source: dict[str, Any],
) -> PrismConfig:
    """A `PrismConfig` with the sizes and tokens in `given`; `source` is kept, for the way back."""
    dtype = given.get("dtype", given.get("torch_dtype"))
    return PrismConfig(
        vocab_size=given["vocab_size"],
        hidden_size=given["hidden_size"],
        num_heads=heads,
        layers=layers,
        num_hidden_layers=given["num_hidden_layers"],
        rule_options=rule_options,
        intermediate_size=hidden,
        norm_eps=norm_eps,
        initializer_range=given.get("initializer_range", 0.02),
        tie_word_embeddings=bool(given["tie_word_embeddings"]),
        pad_token_id=given.get("pad_token_id"),
        bos_token_id=given.get("bos_token_id"),
        eos_token_id=given.get("eos_token_id"),
        architectures=["PrismForCausalLM"],
        converted_from=source,
        **({} if dtype is None else {"dtype": dtype}),
    )


def on_meta(config: PrismConfig) -> PrismForCausalLM:
    """The model of a configuration without its weights: modules, names and shapes."""
    with torch.device("meta"):
        return PrismForCausalLM(config)


def rules_of(model: PrismForCausalLM) -> list[Rule]:
    """The rule of every layer."""
    return [layer.mixer.rule for layer in model.model.layers]


def can_become_prism(rule: Rule) -> bool:
    """Whether a layer is PRISM with one write and a tied erase, or Gated DeltaNet, which is the same."""
    return type(rule) is GatedDelta or (type(rule) is Prism and rule.writes is None and rule.erase is None)


def is_gated_delta(rule: Rule) -> bool:
    """Whether a layer is Gated DeltaNet as published, with a decay per head."""
    return can_become_prism(rule) and isinstance(rule.decay_in, nn.Linear)


def is_attention(rule: Rule) -> bool:
    return isinstance(rule, Softmax)


def ends(model: PrismForCausalLM, embedding: str) -> list[Entry]:
    """Embedding, last norm, and the head unless it is the embedding."""
    entries = [Entry("model.embed_tokens.weight", (embedding,)), Entry("model.norm.weight", ("model.norm.weight",))]
    tied = model.config.tie_word_embeddings
    return entries if tied else [*entries, Entry("lm_head.weight", ("lm_head.weight",))]


def renamed(ours: str, theirs: str, names: dict[str, str]) -> list[Entry]:
    """Entries for weights of modules that differ in their names alone."""
    return [Entry(f"{ours}{one}.weight", (f"{theirs}{other}.weight",)) for one, other in names.items()]


def repeat_heads(rows: Tensor, size: int, group: int) -> Tensor:
    """Rows `[H·size, …]` → `[H·group·size, …]`: every head `group` times, the copies next to each other."""
    return rows.unflatten(0, (-1, size)).repeat_interleave(group, 0).flatten(0, 1) if group > 1 else rows


def first_heads(rows: Tensor, size: int, group: int) -> Tensor:
    """The inverse of `repeat_heads`: the first of every `group` heads."""
    return rows.unflatten(0, (-1, size))[::group].flatten(0, 1) if group > 1 else rows


def heads_repeat(rows: Tensor, size: int, group: int) -> bool:
    """Whether `repeat_heads` could have made these rows."""
    grouped = rows.unflatten(0, (-1, group, size))
    return bool((grouped == grouped[:, :1]).all())


def joined(name: str, parts: tuple[str, ...], sizes: list[int], key_dim: int = 1, group: int = 1) -> Entry:
    """Queries, keys and values in one matrix; queries and keys once for every value head of their group."""

    def join(theirs: list[Tensor]) -> Tensor:
        q, k, v = theirs
        return torch.cat([repeat_heads(q, key_dim, group), repeat_heads(k, key_dim, group), v])

    def split(ours: Tensor) -> list[Tensor]:
        q, k, v = ours.split(sizes)
        return [first_heads(q, key_dim, group), first_heads(k, key_dim, group), v]

    return Entry(name, parts, join, split)


def joined_taps(name: str, parts: tuple[str, ...], sizes: list[int], key_dim: int, group: int) -> Entry:
    """As `joined`, for convolutions: theirs `[channels, 1, taps]`, ours `[taps, channels]`."""
    rows = joined(name, parts, sizes, key_dim, group)

    def join(theirs: list[Tensor]) -> Tensor:
        return rows.join([part.squeeze(1) for part in theirs]).t()

    def split(ours: Tensor) -> list[Tensor]:
        return [part.unsqueeze(1) for part in rows.split(ours.t())]

    return Entry(name, parts, join, split)
