"""flash-linear-attention's `GatedDeltaNetForCausalLM`, with or without softmax attention layers: both ways.

Value heads that share a key head (`num_v_heads` > `num_heads`) get a copy of it each, which computes the same. On the way
back the copies are joined again if they are still equal.
"""

from __future__ import annotations

from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from prism.models.config import PrismConfig
from prism.models.convert.entries import (
    Entry,
    can_become_prism,
    delta_options,
    ends,
    heads_repeat,
    is_attention,
    is_gated_delta,
    joined,
    joined_taps,
    our_config,
    refuse,
    renamed,
    rules_of,
)
from prism.models.convert.shards import Weights
from prism.models.language import PrismForCausalLM

MODEL_TYPE = "gated_deltanet"
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "expand_v": 2.0,
    "use_gate": True,
    "use_short_conv": True,
    "allow_neg_eigval": False,
    "conv_size": 4,
    "head_dim": 256,
    "num_heads": 6,
    "num_v_heads": None,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "hidden_act": "swish",
    "num_hidden_layers": 21,
    "norm_eps": 1e-6,
    "attn": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "attnres_block_size": None,
    "output_gate_activation": "swish",
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
"""Fields of fla's `GatedDeltaNetConfig` that decide what the model computes, with its defaults."""
GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
"""fla's names of an output gate's activation, and ours."""


def config_from(config: dict[str, Any], rule: str, extra: dict[str, Any]) -> PrismConfig:
    """Our configuration for one of fla's. The layers get `rule` with `extra` options."""
    given = {**DEFAULTS, **config}
    if given["attnres_block_size"] is not None:
        raise refuse("attnres_block_size", given["attnres_block_size"], "but our layers have no attention residuals")
    if given["hidden_act"] not in ("swish", "silu"):
        raise refuse("hidden_act", given["hidden_act"], "but our SwiGLU has SiLU")
    if given["use_gate"] and given["output_gate_activation"] not in GATES:
        raise refuse("output_gate_activation", given["output_gate_activation"], "but ours has SiLU or a sigmoid")
    if given["use_short_conv"] and given["conv_size"] < 2:
        raise refuse("conv_size", given["conv_size"], "but a short convolution of ours has at least 2 taps")
    options = {
        "key_dim": given["head_dim"],
        "value_dim": int(given["head_dim"] * given["expand_v"]),
        "conv_size": given["conv_size"] if given["use_short_conv"] else 1,
        "gate": bool(given["use_gate"]),
        **({"gate_by": "sigmoid"} if given["use_gate"] and given["output_gate_activation"] == "sigmoid" else {}),
        "negative_eigenvalues": bool(given["allow_neg_eigval"]),
        "norm_eps": given["norm_eps"],
    }
    hidden = given["intermediate_size"]
    if hidden is None:
        hidden = -(-int(given["hidden_size"] * (given["hidden_ratio"] or 4) * 2 / 3) // 256) * 256
    attention, count = _attention_from(given["attn"], given["hidden_size"]), given["num_hidden_layers"]
    layers: Any = [attention.get(index, rule) for index in range(count)] if attention else rule
    own = {} if attention.keys() >= set(range(count)) else {rule: delta_options(rule, options, extra)}
    return our_config(given, group_of(config)[1], layers, own, hidden, given["norm_eps"], config)


def group_of(config: dict[str, Any]) -> tuple[int, int]:
    """Value heads per key head, and value heads, of a configuration of fla's."""
    heads, value_heads = (config.get(name) or DEFAULTS[name] for name in ("num_heads", "num_v_heads"))
    value_heads = heads if value_heads is None else value_heads
    if value_heads % heads:
        raise refuse("num_v_heads", value_heads, f"which is not a multiple of num_heads ({heads})")
    return value_heads // heads, value_heads


def _attention_from(attn: Any, width: int) -> dict[int, dict[str, Any]]:
    """fla's attention layers, one specification or a list of them, as entries of `PrismConfig.layers` by their place."""
    places: dict[int, dict[str, Any]] = {}
    for spec in [] if attn is None else [attn] if isinstance(attn, dict) else attn:
        if spec.get("qkv_bias"):
            raise refuse("attn.qkv_bias", True, "but our softmax attention has no biases")
        heads, window = spec["num_heads"], spec.get("window_size")
        if width % heads:
            raise refuse("attn.num_heads", heads, f"which does not divide hidden_size ({width})")
        layer = {
            "rule": "softmax" if window is None else "sliding_window",
            "heads": heads,
            "kv_heads": spec.get("num_kv_heads") or heads,
            "rope_base": float(spec.get("rope_theta") or 10000.0),
            **({} if window is None else {"window": window}),
        }
        places |= dict.fromkeys(spec["layers"], layer)
    return places


def config_to(model: PrismForCausalLM, group: int, norm_eps: float | None = None) -> dict[str, Any]:
    """fla's configuration for a model of ours, with `group` value heads per key head.

    Args:
        norm_eps: epsilon of all norms; None: the model's, which must then be one number.
    """
    config = model.config
    found = {index: _sizes(rule) for index, rule in enumerate(rules_of(model)) if is_gated_delta(rule)}
    attention = _attention_to(model)
    if not found:
        raise ValueError("the model has no gated_delta layer: it is no Gated DeltaNet of flash-linear-attention")
    (place, first), *others = found.items()
    for index, sizes in others:
        differing = next((name for name in sizes if sizes[name] != first[name]), None)
        if differing is not None:
            raise ValueError(
                f"layers {place} and {index} have different {differing}, but in flash-linear-attention all Gated "
                "DeltaNet layers have the same"
            )
    if norm_eps is not None:
        first["norm_eps"] = norm_eps
    elif first["norm_eps"] != config.norm_eps:
        raise ValueError(
            f"norm_eps is {config.norm_eps:g} in the model and {first['norm_eps']:g} in its rule, but one number in "
            f"flash-linear-attention: convert with --norm-eps {first['norm_eps']:g} (norm_eps in Python), which changes "
            f"the logits a little, or train with --model.norm-eps {first['norm_eps']:g}"
        )
    if not config.intermediate_size:
        raise ValueError("intermediate_size is 0, but layers of flash-linear-attention have SwiGLUs")
    kept = source_of(config)
    if GATES.get(before := kept.get("output_gate_activation", "")) == GATES[first["output_gate_activation"]]:
        first["output_gate_activation"] = before  # which of two names it had
    heads = first.pop("heads")
    theirs = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_heads": heads // group,
        "num_v_heads": None if group == 1 and kept.get("num_v_heads") is None else heads,
        **first,
        "conv_size": first["conv_size"] if first["use_short_conv"] else kept.get("conv_size", 4),
        "attn": attention,
        "intermediate_size": config.intermediate_size,
        **{name: getattr(config, name) for name in ("tie_word_embeddings", "initializer_range")},
        **{name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if kept and kept.get("intermediate_size") is None:
        before = config_from(kept, "gated_delta", {}).intermediate_size
        if config.intermediate_size == before:
            theirs["intermediate_size"] = None  # hidden_ratio decides it, as before
    dtype = {} if config.dtype is None else {"dtype": str(config.dtype).removeprefix("torch.")}
    return {"architectures": ["GatedDeltaNetForCausalLM"], "model_type": MODEL_TYPE, **dtype, **kept, **theirs}


def source_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The configuration of fla's that a model of ours was converted from; {} if there is none."""
    source: dict[str, Any] = getattr(config, "converted_from", None) or {}
    return source if source.get("model_type") == MODEL_TYPE else {}


def _sizes(rule: Any) -> dict[str, Any]:
    """What fla's configuration says of a Gated DeltaNet layer."""
    return {
        "heads": rule.heads,
        "head_dim": rule.key_dim,
        "expand_v": rule.value_dim / rule.key_dim,
        "use_gate": rule.gate is not None,
        "output_gate_activation": "sigmoid" if rule.gate_by == "sigmoid" else "swish",
        "use_short_conv": rule.conv.size > 1,
        "conv_size": rule.conv.size,
        "allow_neg_eigval": rule.beta_scale != 1.0,
        "norm_eps": rule.norm.norm.eps,
    }


def _attention_to(model: PrismForCausalLM) -> Any:
    """fla's `attn` for the softmax layers of ours: None, one specification, or a list of them."""
    specs: list[dict[str, Any]] = []
    for index, rule in enumerate(rules_of(model)):
        if is_gated_delta(rule):
            continue
        if not is_attention(rule):
            what = f"PRISM with {rule.write_rank} writes" if rule.name == "prism" else repr(rule.name)
            what = f"{rule.name!r} with a decay per channel" if can_become_prism(rule) else what
            raise ValueError(f"layer {index} is {what}, which flash-linear-attention's Gated DeltaNet does not have")
        layer: Any = rule
        odd = layer.heads * layer.key_dim != model.config.hidden_size or layer.rope_dims != layer.key_dim
        more = (layer.conv, layer.gate, layer.query_norm)
        if odd or layer.rotary is None or any(part is not None for part in more):
            raise ValueError(
                f"layer {index} is softmax attention with options that flash-linear-attention does not have: key_dim, "
                "rope_base, rope_dims, conv_size, qk_norm and gate must be the defaults"
            )
        spec = {
            "num_heads": layer.heads,
            "num_kv_heads": layer.kv_heads,
            "qkv_bias": False,
            "window_size": layer.window,
            "rope_theta": layer.rotary.base,
        }
        same = next((known for known in specs if {**known, **spec} == known), None)
        if same is None:
            specs.append({"layers": [index], **spec})
        else:
            same["layers"].append(index)
    return None if not specs else specs[0] if len(specs) == 1 else specs


def entries(model: PrismForCausalLM, group: int) -> list[Entry]:
    """The tensors of a model of ours, and fla's. PRISM's further writes have none."""
    found = ends(model, "model.embeddings.weight")
    for index, rule in enumerate(rules_of(model)):
        place = f"model.layers.{index}."
        ours, theirs = f"{place}mixer.rule.", f"{place}attn."
        found += renamed(place, place, {"mixer_norm": "attn_norm", "mlp_norm": "mlp_norm"})
        found += renamed(place, place, {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")})
        found += renamed(ours, theirs, {"out": "o_proj"})
        layer: Any = rule
        delta = not is_attention(rule)
        sizes, heads = layer.sizes, (layer.key_dim, group) if delta else (1, 1)
        found.append(joined(f"{ours}qkv.weight", tuple(f"{theirs}{name}_proj.weight" for name in "qkv"), sizes, *heads))
        if not delta:
            continue
        if layer.conv.size > 1:
            names = tuple(f"{theirs}{name}_conv1d.weight" for name in "qkv")
            found.append(joined_taps(f"{ours}conv.weight", names, sizes, *heads))
        found += renamed(ours, theirs, {"beta": "b_proj", "decay_in": "a_proj", "norm.norm": "o_norm"})
        found += [Entry(f"{ours}decay.{name}", (f"{theirs}{name}",)) for name in ("A_log", "dt_bias")]
        found += [] if layer.gate is None else renamed(ours, theirs, {"gate": "g_proj"})
    return found


def group_in(model: PrismForCausalLM, weights: Weights) -> int:
    """Value heads per key head on the way back: as in the source, if no layer has changed one of the copies."""
    kept = source_of(model.config)
    group = group_of(kept)[0] if kept else 1
    if group == 1:
        return 1
    for index, rule in enumerate(rules_of(model)):
        if not is_gated_delta(rule):
            continue
        layer: Any = rule
        place, keys = f"model.layers.{index}.mixer.rule.", 2 * layer.sizes[0]
        rows = [weights[f"{place}qkv.weight"][:keys]]
        rows += [weights[f"{place}conv.weight"].t()[:keys]] if layer.conv.size > 1 else []
        if layer.heads % group or not all(heads_repeat(part, layer.key_dim, group) for part in rows):
            return 1
    return group
