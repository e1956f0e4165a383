"""transformers' Qwen3-Next and Qwen3.5 without experts, to ours: Gated DeltaNet layers and gated softmax attention layers.

Their norms multiply by 1 + w, so that the tensors with w have 1 added. Of a model that also sees pictures, the language model
is converted. Value heads that share a key head get a copy of it each, which computes the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prism.models.config import PrismConfig
from prism.models.convert.entries import (
    Entry,
    delta_options,
    is_attention,
    our_config,
    refuse,
    renamed,
    repeat_heads,
    rules_of,
)
from prism.models.language import PrismForCausalLM

MODEL_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5")
_RELATIVES = {
    "olmo_hybrid": "its attention layers normalise queries and keys over all heads, and their outputs instead of inputs",
    "qwen3_5_moe": "its layers have experts",
    "qwen3_5_moe_text": "its layers have experts",
}
"""Models with Gated DeltaNet layers that ours cannot express, and why."""
_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def refuse_relatives(model_type: Any) -> None:
    """Raise ValueError for a model with Gated DeltaNet layers that has no counterpart."""
    if model_type in _RELATIVES:
        raise ValueError(f"a model of type {model_type!r} cannot be converted: {_RELATIVES[model_type]}")


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model, with defaults."""
    inner = config.get("text_config", {})
    shared = ("dtype", "torch_dtype", "tie_word_embeddings")
    outer: dict[str, Any] = {name: config[name] for name in shared if name in config}
    return {**_DEFAULTS, **outer, **inner} if inner else {**_DEFAULTS, **config}


def config_from(config: dict[str, Any], rule: str, extra: dict[str, Any]) -> PrismConfig:
    """Our configuration for one of theirs. The Gated DeltaNet layers get `rule` with `extra` options."""
    given = _text(config)
    count = given["num_hidden_layers"]
    if given["hidden_act"] not in ("silu", "swish"):
        raise refuse("hidden_act", given["hidden_act"], "but our SwiGLU has SiLU")
    if given.get("attention_bias"):
        raise refuse("attention_bias", True, "but our softmax attention has no biases")
    experts, every = given.get("num_experts") or 0, given.get("decoder_sparse_step") or 1
    dense = set(given.get("mlp_only_layers") or ())
    if experts and any((index + 1) % every == 0 and index not in dense for index in range(count)):
        raise refuse("num_experts", experts, "but our layers have no experts")
    heads, key_heads = given["linear_num_value_heads"], given["linear_num_key_heads"]
    if heads % key_heads:
        raise refuse("linear_num_value_heads", heads, f"which is not a multiple of linear_num_key_heads ({key_heads})")
    options = {
        "key_dim": given["linear_key_head_dim"],
        "value_dim": given["linear_value_head_dim"],
        "conv_size": given["linear_conv_kernel_dim"],
        "norm_eps": given["rms_norm_eps"],
    }
    places = _kinds(given)
    kinds: dict[str, Any] = {"linear_attention": rule, "full_attention": "softmax"}
    rule_options = {rule: delta_options(rule, options, extra)} if "linear_attention" in places else {}
    if "full_attention" in places:
        rule_options["softmax"] = _attention(given)
    layers = [kinds[kind] for kind in places]
    hidden = given["intermediate_size"]
    return our_config(given, heads, layers, rule_options, hidden, given["rms_norm_eps"], config)


def _kinds(given: dict[str, Any]) -> list[str]:
    """The kind of every layer."""
    count, every = given["num_hidden_layers"], given.get("full_attention_interval") or 4
    usual = ["full_attention" if (index + 1) % every == 0 else "linear_attention" for index in range(count)]
    kinds: list[str] = given.get("layer_types") or usual
    unknown = next((kind for kind in kinds if kind not in ("linear_attention", "full_attention")), None)
    if unknown is not None:
        raise refuse("layer_types", unknown, "which is neither linear_attention nor full_attention")
    return kinds


def _attention(given: dict[str, Any]) -> dict[str, Any]:
    """Options of our softmax attention for theirs."""
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise refuse("rope_type", kind, "but our rotary positions are not rescaled")
    share = rope.get("partial_rotary_factor", given.get("partial_rotary_factor", 0.25))
    return {
        "heads": given["num_attention_heads"],
        "kv_heads": given["num_key_value_heads"],
        "key_dim": given["head_dim"],
        "rope_base": float(rope.get("rope_theta", given.get("rope_theta", 10000.0))),
        "rope_dims": int(given["head_dim"] * share),
        "qk_norm": True,
        "norm_eps": given["rms_norm_eps"],
        "gate": True,
    }


def left_out(name: str) -> bool:
    """Whether a tensor has no part in the language model's logits: pictures, and the prediction of further tokens."""
    return name.startswith(("model.visual.", "mtp."))


def entries(model: PrismForCausalLM, config: dict[str, Any]) -> list[Entry]:
    """The tensors of a model of ours, and theirs. PRISM's further writes have none."""
    given = _text(config)
    stem = "model.language_model." if "text_config" in config else "model."
    found = [Entry("model.embed_tokens.weight", (f"{stem}embed_tokens.weight",))]
    found.append(_shifted("model.norm.weight", f"{stem}norm.weight"))
    found += [] if model.config.tie_word_embeddings else [Entry("lm_head.weight", ("lm_head.weight",))]
    for index, rule in enumerate(rules_of(model)):
        ours, theirs = f"model.layers.{index}.", f"{stem}layers.{index}."
        found.append(_shifted(f"{ours}mixer_norm.weight", f"{theirs}input_layernorm.weight"))
        found.append(_shifted(f"{ours}mlp_norm.weight", f"{theirs}post_attention_layernorm.weight"))
        found += renamed(ours, theirs, {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")})
        ours += "mixer.rule."
        if is_attention(rule):
            found += _attention_entries(ours, f"{theirs}self_attn.", rule)
        else:
            interleaved = config["model_type"] == "qwen3_next"
            found += _delta_entries(ours, f"{theirs}linear_attn.", given, interleaved)
    return found


def _shifted(ours: str, theirs: str) -> Entry:
    """A norm's weight 1 + w. In float32: rounded to bfloat16 it would lose what w has."""
    return Entry(ours, (theirs,), lambda parts: 1.0 + parts[0].float())


def _attention_entries(ours: str, theirs: str, rule: Any) -> list[Entry]:
    def halves(rows: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and gates, which are interleaved by head."""
        queries, gates = rows.unflatten(0, (rule.heads, 2, rule.key_dim)).unbind(1)
        return queries.flatten(0, 1), gates.flatten(0, 1)

    q, k, v = (f"{theirs}{name}_proj.weight" for name in "qkv")
    return [
        Entry(f"{ours}qkv.weight", (q, k, v), lambda parts: torch.cat([halves(parts[0])[0], *parts[1:]])),
        Entry(f"{ours}gate.weight", (q,), lambda parts: halves(parts[0])[1]),
        _shifted(f"{ours}query_norm.weight", f"{theirs}q_norm.weight"),
        _shifted(f"{ours}key_norm.weight", f"{theirs}k_norm.weight"),
        *renamed(ours, theirs, {"out": "o_proj"}),
    ]


def _delta_entries(ours: str, theirs: str, given: dict[str, Any], interleaved: bool) -> list[Entry]:
    heads, key_dim = given["linear_num_key_heads"], given["linear_key_head_dim"]
    group = given["linear_num_value_heads"] // heads
    keys, values = heads * key_dim, heads * group * given["linear_value_head_dim"]

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([repeat_heads(q, key_dim, group), repeat_heads(k, key_dim, group), v])

    def by_head(rows: Tensor, sizes: list[int]) -> list[Tensor]:
        """The parts of rows in which every key head has its own part of each, `sizes` rows."""
        return [part.flatten(0, 1) for part in rows.unflatten(0, (heads, sum(sizes))).split(sizes, 1)]

    def taps(parts: list[Tensor]) -> Tensor:
        return repeated(*parts[0].squeeze(1).split([keys, keys, values])).t()

    found = [
        Entry(f"{ours}conv.weight", (f"{theirs}conv1d.weight",), taps),
        *renamed(ours, theirs, {"norm.norm": "norm", "out": "out_proj"}),
        *[Entry(f"{ours}decay.{name}", (f"{theirs}{name}",)) for name in ("A_log", "dt_bias")],
    ]
    if not interleaved:
        qkv = (f"{theirs}in_proj_qkv.weight",)
        found.append(Entry(f"{ours}qkv.weight", qkv, lambda parts: repeated(*parts[0].split([keys, keys, values]))))
        names = {"gate": "in_proj_z", "beta": "in_proj_b", "decay_in": "in_proj_a"}
        return [*found, *renamed(ours, theirs, names)]
    qkvz, ba = (f"{theirs}in_proj_qkvz.weight",), (f"{theirs}in_proj_ba.weight",)
    sizes, rates = [key_dim, key_dim, values // heads, values // heads], [group, group]
    return [
        *found,
        Entry(f"{ours}qkv.weight", qkvz, lambda parts: repeated(*by_head(parts[0], sizes)[:3])),
        Entry(f"{ours}gate.weight", qkvz, lambda parts: by_head(parts[0], sizes)[3]),
        Entry(f"{ours}beta.weight", ba, lambda parts: by_head(parts[0], rates)[0]),
        Entry(f"{ours}decay_in.weight", ba, lambda parts: by_head(parts[0], rates)[1]),
    ]
