"""Small random models of transformers with large weights, so that a broken memory or cache shows in the logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch

from prism.hf.families import FAMILIES, modeling_file

VOCABULARY = 61
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA = {"mamba_d_state": 16, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
CLASSES = {
    "qwen3_next": ("Qwen3NextForCausalLM", {**_COMMON, **_DELTA, **_EXPERTS}),
    "qwen3_5": ("Qwen3_5ForCausalLM", {**_COMMON, **_DELTA}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {**_COMMON, **_DELTA, **_EXPERTS}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", {**_COMMON, **_DELTA}),
    "mamba2": (
        "Mamba2ForCausalLM",
        {**_COMMON, "state_size": 16, "num_heads": 4, "n_groups": 2, "expand": 2, "chunk_size": 8},
    ),
    "bamba": ("BambaForCausalLM", {**_COMMON, **_MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1ForCausalLM", {**_COMMON, **_MAMBA, "mamba_d_ssm": 64, "mlp_multipliers": [0.8, 1.25]}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **_COMMON,
            **_MAMBA,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            **_COMMON,
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 8,
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            **_COMMON,
            "num_hidden_layers": 3,
            "mamba_d_state": 16,
            "n_mamba_heads": 4,
            "mamba_ngroups": 2,
            "mamba_expand": 2,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "mamba", "hybrid"],
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": False,
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        {
            **_COMMON,
            "layer_types": ["linear_attention", "full_attention"],
            "block_size": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "xlstm": (
        "xLSTMForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 128,  # a multiple of 64, for which its cache has the right shape
            "embedding_dim": 128,
            "num_heads": 2,
            "num_blocks": 2,
            "num_hidden_layers": 2,
            "chunk_size": 8,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        {**_COMMON, "lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 64},
    ),
}


def tiny(name: str, **changes: Any) -> Any:
    """A model of the family, the same for every call, with weights ten times as large as usual."""
    class_name, settings = CLASSES[name]
    kind = getattr(import_module(modeling_file(name)), class_name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**settings, **changes})).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "conv" not in key:
                parameter.normal_(std=0.2)
            elif "norm" not in key and "A_log" not in key and not key.endswith(".D"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def tokens(batch: int = 2, length: int = 21) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


@contextmanager
def torch_functions(name: str) -> Iterator[None]:
    """transformers' own torch path, also where flash-linear-attention is installed and there is no GPU."""
    file = import_module(modeling_file(name))
    family = next(family for family in FAMILIES if name in family.models)
    with pytest.MonkeyPatch.context() as patch:
        for function in family.functions:
            patch.setattr(file, function, unwrapped(getattr(file, function)))
        yield


def unwrapped(function: Any) -> Any:
    """The torch function inside transformers' decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function
