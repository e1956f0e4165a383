"""Say which functions of transformers are replaced, family by family, and which families are not served and why."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Family:
    """A kind of memory in transformers, and what replaces it."""

    kind: str
    models: tuple[str, ...]
    """Folders of `transformers.models`."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """Function of the modeling file → ours, `"module:function"`."""
    methods: Mapping[str, str] = field(default_factory=dict)
    """`"model.Class.method"` → a function that makes the new method from the old one."""
    backbones: tuple[str, ...] = ()
    """For each model the class whose `forward` takes `position_ids` and passes its other arguments on to all layers."""

    def replacements(self, model: str) -> dict[str, str]:
        """The methods of one model, `"Class.method"`, and what makes the new ones."""
        found = {key.removeprefix(f"{model}."): new for key, new in self.methods.items() if key.startswith(f"{model}.")}
        for name, backbone in zip(self.models, self.backbones, strict=False):
            if name == model:
                found[f"{backbone}.forward"] = "prism.dropin.families:packed_by_positions"
        return found


_CONV = {
    "causal_conv1d_fn": "prism.dropin.conv:causal_conv1d_fn",
    "causal_conv1d_update": "prism.dropin.conv:causal_conv1d_update",
}
FAMILIES = (
    Family(
        "Gated DeltaNet",
        ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"),
        {
            "torch_chunk_gated_delta_rule": "prism.dropin.delta:chunk_gated_delta_rule",
            "torch_recurrent_gated_delta_rule": "prism.dropin.delta:recurrent_gated_delta_rule",
            **_CONV,
        },
        backbones=("Qwen3NextModel", "Qwen3_5TextModel", "Qwen3_5MoeTextModel", "OlmoHybridModel"),
    ),
    Family(
        "Mamba-2",
        ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"),
        {
            "mamba2_chunk_scan": "prism.dropin.mamba2:chunk_scan",
            "mamba2_selective_state_update": "prism.dropin.mamba2:selective_state_update",
            "mamba2_split_conv1d_scan_combined": "prism.dropin.mamba2:no_fused_layer",
            **_CONV,
        },
        methods={"mamba2.Mamba2ForCausalLM.forward": "prism.dropin.families:passing_documents"},
        backbones=(
            "Mamba2Model",
            "BambaModel",
            "FalconH1Model",
            "GraniteMoeHybridModel",
            "NemotronHModel",
            "Zamba2Model",
        ),
    ),
    Family(
        "lightning attention",
        ("minimax",),
        methods={"minimax.MiniMaxLightningAttention.forward": "prism.dropin.lightning:lightning_attention"},
        backbones=("MiniMaxModel",),
    ),
    Family("mLSTM", ("xlstm",), methods={"xlstm.xLSTMBackend.forward": "prism.dropin.mlstm:backend"}),
    Family(
        "RG-LRU",
        ("recurrent_gemma",),
        methods={
            "recurrent_gemma.RecurrentGemmaRglru._rnn_scan": "prism.dropin.rg_lru:scan",
            "recurrent_gemma.RecurrentGemmaRecurrentBlock.forward": "prism.dropin.rg_lru:recurrent_block",
        },
        backbones=("RecurrentGemmaModel",),
    ),
)

NOT_SERVED = {
    "mamba": "Mamba-1 has a decay per channel and state",
    "falcon_mamba": "Mamba-1 has a decay per channel and state",
    "jamba": "Mamba-1 has a decay per channel and state",
    "zamba": "Mamba-1 has a decay per channel and state",
    "kimi_linear": "its functions take the gates before their activation",
    "qwen4_exp": "it is experimental and changes between releases",
    "rwkv": "RWKV-4 is a scalar recurrence per channel",
    "lfm2": "it has a short convolution and no memory",
}


DOCUMENTS = ("position_ids", "seq_idx", "cu_seq_lens_q")
"""Arguments of a model that say which documents its rows hold."""
_PASSED = "_prism_documents"


def modeling_file(model: str) -> str:
    """The module that defines a model of transformers."""
    return f"transformers.models.{model}.modeling_{model}"


def packed_by_positions(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backbone's `forward`: position_ids that start again become document numbers for the memory layers.

    transformers finds packed documents in `position_ids` for its attention layers, under the same conditions (no mask, no
    cache), and lets the state of the other layers run through.
    """
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def with_documents(self: Any, *positional: Any, **named: Any) -> Any:
        named |= self.__dict__.pop(_PASSED, {})
        numbers = _numbers(dict(zip(names, positional, strict=False)) | named)
        if numbers is not None:
            named["seq_idx"] = numbers
        return forward(self, *positional, **named)

    return with_documents


def passing_documents(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `forward` that does not pass packed documents on to its backbone."""

    @functools.wraps(forward)
    def with_documents(self: Any, *positional: Any, **named: Any) -> Any:
        given = {name: named[name] for name in DOCUMENTS if named.get(name) is not None}
        if given:
            self.backbone.__dict__[_PASSED] = given
        return forward(self, *positional, **named)

    return with_documents


def _numbers(given: Mapping[str, Any]) -> Tensor | None:
    """Document numbers `[B, T]` from a call's position_ids; None if it packs nothing, or says itself what it packs."""
    from transformers.masking_utils import find_packed_sequence_indices

    if any(
        given.get(name) is not None for name in ("attention_mask", "past_key_values", "cache_params", *DOCUMENTS[1:])
    ):
        return None
    positions = given.get("position_ids")
    if positions is not None and positions.ndim == 3:  # text positions above those of images
        positions = positions[0] if positions.shape[0] == 4 else None
    return None if positions is None or positions.shape[-1] < 2 else find_packed_sequence_indices(positions)
