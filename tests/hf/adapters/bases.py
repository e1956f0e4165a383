"""Small randomly initialised base models of every family that adapters support, and what tests do with them."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor

from prism.hf.adapters import PrismAdapterConfig
from prism.models import PrismConfig, PrismForCausalLM

VOCABULARY = 50
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "initializer_range": 0.3,  # with small weights nothing depends on the memory
    "pad_token_id": 0,
}
_EXPERTS = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 2,
    "num_experts_per_tok": 2,
}
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _EXPERTS),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {"linear_num_key_heads": 4}),
}
OWN = ("gated_delta", "prism")
FAMILIES = (*OWN, *_FAMILIES)
FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


def base(family: str, **sizes: Any) -> Any:
    """A model with layers 0 and 2 of Gated DeltaNet and softmax attention between. The same call gives the same model."""
    torch.manual_seed(0)
    if family in OWN:
        given = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "initializer_range": 0.3, **sizes}
        layers = [{"rule": "prism", "steps": 1} if family == "prism" else family, "softmax"]
        layers = sizes.get("layers", [layers[0], "softmax", layers[0]])
        given["layers"] = layers
        return PrismForCausalLM(PrismConfig(vocab_size=VOCABULARY, pad_token_id=0, **given)).eval()
    config, model, more = _FAMILIES[family]
    without_fla(family)
    module = import_module(f"transformers.models.{family}")
    return getattr(module, model)(getattr(module, config)(**{**_SIZES, **more, **sizes})).eval()


def without_fla(family: str) -> None:
    """Let a module of transformers compute with torch, also if flash-linear-attention is installed, which needs a GPU."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    for name in FUNCTIONS:
        setattr(module, name, inspect.unwrap(getattr(module, name)))


def adapted(family: str, name: str = "default", **options: Any) -> PeftModel:
    """A base with a new adapter."""
    model = get_peft_model(base(family), PrismAdapterConfig(**{"rank": 4, **options}), adapter_name=name)
    return model.eval()  # type: ignore[return-value]


@torch.no_grad()
def perturb(model: PeftModel, seed: int = 1, name: str = "default") -> PeftModel:
    """Give an adapter the weights that training might have found: γ of order 1."""
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if f".prism_branches.{name}." in key:
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(rows: int = 2, length: int = 14, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: Tensor, cuts: tuple[int, ...] = (), **options: Any) -> Tensor:
    """Logits of all tokens: in one call, or with a cache in several, cut before the tokens in `cuts`."""
    if not cuts:
        return model(input_ids=ids, use_cache=False, **options).logits
    cache, parts = None, []
    for start, end in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
        out = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    return torch.cat(parts, 1)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two tensors agree, relative to the largest number."""
    return bool((a - b).abs().max() <= tolerance * b.abs().max())
