"""Say which functions of transformers are replaced, family by family, and which families are not served and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
                found[f"{backbone}.forward"] = "prism.hf.documents:packed_by_positions"
        return found


_CONV = {
    "causal_conv1d_fn": "prism.hf.conv:causal_conv1d_fn",
    "causal_conv1d_update": "prism.hf.conv:causal_conv1d_update",
}
_DELTA = (
    ("qwen3_next", "Qwen3Next"),
    ("qwen3_5", "Qwen3_5"),
    ("qwen3_5_moe", "Qwen3_5Moe"),
    ("olmo_hybrid", "OlmoHybrid"),
)
_MAMBA2 = (
    ("mamba2", "Mamba2"),
    ("bamba", "Bamba"),
    ("falcon_h1", "FalconH1"),
    ("granitemoehybrid", "GraniteMoeHybrid"),
    ("nemotron_h", "NemotronH"),
    ("zamba2", "Zamba2"),
)
_WITH_MAPS = {
    "mamba2": ("Mamba2Mixer",),
    "bamba": ("BambaMixer", "BambaAttention"),
    "falcon_h1": ("FalconH1Mixer", "FalconH1Attention"),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", "GraniteMoeHybridAttention", "GraniteMoeHybridMLP"),
    "nemotron_h": ("NemotronHMamba2Mixer", "NemotronHAttention", "NemotronHMLP"),
    "zamba2": ("Zamba2MambaMixer", "Zamba2Attention", "Zamba2MLP"),
}
"""Layers of the Mamba-2 family with linear maps."""
_MAPS = "prism.hf.linear_maps:layer"
_MLP = "prism.hf.linear_maps:mlp"
_EXPERTS = "prism.hf.experts:experts"
_RMS_NORM = "prism.hf.norms:rms_norm"
_CENTRED_RMS_NORM = "prism.hf.norms:centred_rms_norm"
FAMILIES = (
    Family(
        "Gated DeltaNet",
        tuple(model for model, _ in _DELTA),
        {
            "torch_chunk_gated_delta_rule": "prism.hf.delta:chunk_gated_delta_rule",
            "torch_recurrent_gated_delta_rule": "prism.hf.delta:recurrent_gated_delta_rule",
            "apply_rotary_pos_emb": "prism.hf.rotary:apply_rotary_pos_emb",
            **_CONV,
        },
        methods={
            f"{model}.{prefix}{part}.forward": ours
            for model, prefix in _DELTA
            for part, ours in (
                ("GatedDeltaNet", f"prism.hf.delta_layer:{model.removesuffix('_moe')}"),
                ("Attention", _MAPS),
                ("MLP", _MLP),
                ("Experts", _EXPERTS),
                ("SparseMoeBlock", "prism.hf.experts:block"),
                ("RMSNormGated", "prism.hf.delta:gated_norm"),
                ("RMSNorm", _RMS_NORM if model == "olmo_hybrid" else _CENTRED_RMS_NORM),
            )
            if part not in ("Experts", "SparseMoeBlock") or model in ("qwen3_next", "qwen3_5_moe")
        },
        backbones=("Qwen3NextModel", "Qwen3_5TextModel", "Qwen3_5MoeTextModel", "OlmoHybridModel"),
    ),
    Family(
        "Mamba-2",
        tuple(model for model, _ in _MAMBA2),
        {
            "mamba2_chunk_scan": "prism.hf.mamba2:chunk_scan",
            "mamba2_selective_state_update": "prism.hf.mamba2:selective_state_update",
            "mamba2_split_conv1d_scan_combined": "prism.hf.mamba2:no_fused_layer",
            **_CONV,
        },
        methods={
            "mamba2.Mamba2ForCausalLM.forward": "prism.hf.documents:passing_documents",
            "mamba2.MambaRMSNormGated.forward": "prism.hf.mamba2:gated_norm",
            "bamba.BambaRMSNormGated.forward": "prism.hf.mamba2:gated_norm",
            "granitemoehybrid.GraniteMoeHybridRMSNormGated.forward": "prism.hf.mamba2:gated_norm",
            "nemotron_h.NemotronHRMSNormGated.forward": "prism.hf.mamba2:gated_norm",
            "zamba2.Zamba2RMSNormGated.forward": "prism.hf.mamba2:gated_norm",
            "bamba.BambaMLP.forward": _MLP,
            "falcon_h1.FalconH1MLP.forward": _MLP,
            **{f"{model}.{prefix}RMSNorm.forward": _RMS_NORM for model, prefix in _MAMBA2},
            **{f"{model}.{kind}.forward": _MAPS for model, kinds in _WITH_MAPS.items() for kind in kinds},
        },
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
        methods={
            "minimax.MiniMaxLightningAttention.forward": "prism.hf.lightning:lightning_attention",
            "minimax.MiniMaxRMSNorm.forward": _RMS_NORM,
            "minimax.MiniMaxExperts.forward": _EXPERTS,
            "minimax.MiniMaxAttention.forward": _MAPS,
        },
        backbones=("MiniMaxModel",),
    ),
    Family(
        "mLSTM",
        ("xlstm",),
        methods={
            "xlstm.xLSTMBackend.forward": "prism.hf.mlstm:backend",
            "xlstm.xLSTMLayer.forward": _MAPS,
            "xlstm.xLSTMFeedForward.forward": _MAPS,
        },
    ),
    Family(
        "RG-LRU",
        ("recurrent_gemma",),
        methods={
            "recurrent_gemma.RecurrentGemmaRglru._rnn_scan": "prism.hf.rg_lru:scan",
            "recurrent_gemma.RecurrentGemmaRglru.forward": "prism.hf.rg_lru:unit",
            "recurrent_gemma.RecurrentGemmaRecurrentBlock.forward": "prism.hf.rg_lru:recurrent_block",
            "recurrent_gemma.RecurrentGemmaRMSNorm.forward": _CENTRED_RMS_NORM,
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


def modeling_file(model: str) -> str:
    """The module that defines a model of transformers."""
    return f"transformers.models.{model}.modeling_{model}"
