"""Gated DeltaNet models of flash-linear-attention for tests: random weights, and a plain forward pass in float64.

fla's kernels need a GPU, and fla need not be installed: names, shapes and the forward pass are written out here. A test
compares them with fla where it is there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

SMALL = {
    "model_type": "gated_deltanet",
    "architectures": ["GatedDeltaNetForCausalLM"],
    "hidden_size": 16,
    "num_heads": 2,
    "head_dim": 4,
    "expand_v": 1.5,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "norm_eps": 1e-2,
    "attn_mode": "chunk",
    "fuse_norm": True,
}
"""A configuration whose epsilon is so large that a wrong one is seen."""


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of fla's model."""
    D, K, taps = config["hidden_size"], config["head_dim"], config.get("conv_size", 4)
    H = config["num_heads"]
    values, V = config.get("num_v_heads") or H, int(K * config.get("expand_v", 2.0))
    hidden = config["intermediate_size"]
    found = {"model.embeddings.weight": (config["vocab_size"], D), "model.norm.weight": (D,)}
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (config["vocab_size"], D)
    for i in range(config["num_hidden_layers"]):
        attn = _attention(config, i)
        layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (D,), "mlp_norm.weight": (D,)}
        layer |= {"mlp.gate_proj.weight": (hidden, D), "mlp.up_proj.weight": (hidden, D)}
        layer |= {"mlp.down_proj.weight": (D, hidden)}
        sizes = {"q": H * K, "k": H * K, "v": values * V}
        if attn is not None:
            kv = D // attn["num_heads"] * attn.get("num_kv_heads", attn["num_heads"])
            sizes = {"q": D, "k": kv, "v": kv}
        layer |= {f"attn.{name}_proj.weight": (size, D) for name, size in sizes.items()}
        layer["attn.o_proj.weight"] = (D, D if attn is not None else values * V)
        if attn is None:
            if config.get("use_short_conv", True):
                layer |= {f"attn.{name}_conv1d.weight": (size, 1, taps) for name, size in sizes.items()}
            layer |= {f"attn.{name}_proj.weight": (values, D) for name in "ab"}
            layer |= {"attn.A_log": (values,), "attn.dt_bias": (values,), "attn.o_norm.weight": (V,)}
            if config.get("use_gate", True):
                layer["attn.g_proj.weight"] = (values * V, D)
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return found


def save(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A model folder with large random weights: no part of them goes unnoticed."""
    config = {**SMALL, "dtype": str(dtype).removeprefix("torch."), **changes}
    torch.manual_seed(seed)
    tensors = {name: torch.randn(shape) * 0.5 for name, shape in shapes(config).items()}
    tensors = {name: 1 + 0.3 * x if "norm" in name else x for name, x in tensors.items()}
    folder.mkdir(parents=True)
    save_file({name: x.to(dtype) for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _attention(config: dict[str, Any], layer: int) -> dict[str, Any] | None:
    attn = config.get("attn")
    specs = [] if attn is None else [attn] if isinstance(attn, dict) else attn
    return next((spec for spec in specs if layer in spec["layers"]), None)


def logits(folder: Path, ids: Tensor) -> Tensor:
    """fla's model on token ids `[B, T]`, token by token in float64."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
    eps = config["norm_eps"]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    x = w["model.embeddings.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        p = {name.removeprefix(f"model.layers.{i}."): v for name, v in w.items() if f"layers.{i}." in name}
        attn = _attention(config, i)
        y = norm(x, p["attn_norm.weight"])
        x = x + (_delta(config, p, y, norm) if attn is None else _softmax(attn, p, y)) @ p["attn.o_proj.weight"].T
        y = norm(x, p["mlp_norm.weight"])
        x = (
            x
            + (F.silu(y @ p["mlp.gate_proj.weight"].T) * (y @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
        )
    return norm(x, w["model.norm.weight"]) @ w.get("lm_head.weight", w["model.embeddings.weight"]).T


def _delta(config: dict[str, Any], p: dict[str, Tensor], x: Tensor, norm: Any) -> Tensor:
    def part(name: str) -> Tensor:
        y = x @ p[f"attn.{name}_proj.weight"].T
        taps = p.get(f"attn.{name}_conv1d.weight")
        if taps is not None:
            padded = F.pad(y.transpose(1, 2), (taps.shape[-1] - 1, 0))
            y = F.conv1d(padded, taps, groups=taps.shape[0]).transpose(1, 2)
        return F.silu(y)

    K, H = config["head_dim"], config["num_heads"]
    group = (config.get("num_v_heads") or H) // H
    q, k = (part(name).unflatten(-1, (H, K)).repeat_interleave(group, 2) for name in "qk")
    v = part("v").unflatten(-1, (H * group, -1))
    q, k = (z * (z.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for z in (q, k))
    beta = (x @ p["attn.b_proj.weight"].T).sigmoid() * (2 if config.get("allow_neg_eigval") else 1)
    g = -p["attn.A_log"].exp() * F.softplus(x @ p["attn.a_proj.weight"].T + p["attn.dt_bias"])
    o = norm(recurrence(q, k, v, beta, g), p["attn.o_norm.weight"]).flatten(-2)
    if not config.get("use_gate", True):
        return o
    gate = x @ p["attn.g_proj.weight"].T
    return o * (gate.sigmoid() if config.get("output_gate_activation") == "sigmoid" else F.silu(gate))


def recurrence(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """The gated delta rule: `[B, T, H, K]` twice, `[B, T, H, V]`, `[B, T, H]` twice → `[B, T, H, V]`."""
    S, read = v.new_zeros(*k[:, 0].shape, v.shape[-1]), []
    for t in range(v.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        error = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)) * beta[:, t, :, None]
        S = S + k[:, t, :, :, None] * error[:, :, None]
        read.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[-1] ** -0.5, S))
    return torch.stack(read, 1)


def _softmax(attn: dict[str, Any], p: dict[str, Tensor], x: Tensor) -> Tensor:
    heads, T = attn["num_heads"], x.shape[1]
    q, k, v = ((x @ p[f"attn.{name}_proj.weight"].T).unflatten(-1, (-1, x.shape[-1] // heads)) for name in "qkv")
    pairs = q.shape[-1] // 2
    angle = torch.arange(T)[:, None, None] * attn.get("rope_theta", 10000.0) ** -(torch.arange(pairs) / pairs).double()

    def turned(z: Tensor) -> Tensor:
        a, b = z.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    q, k = turned(q), turned(k)
    k, v = (z.repeat_interleave(heads // z.shape[2], 2) for z in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (distance >= 0) & (distance < (attn.get("window_size") or T))
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(-2)
