"""Norms of a memory's output, applied before the output projection: `[B, T, H, V]` → `[B, T, H·V]`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import layer_ops
from prism.engine.compat import is_unmodified
from prism.engine.token import Norm


def rms_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """norm(x) with the weight in x's dtype: under autocast x is bfloat16, and torch has no fused norm for mixed dtypes."""
    if norm.weight is None or norm.weight.dtype == x.dtype:
        return norm(x)
    return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)


class HeadNorm(nn.Module):
    """RMSNorm over each head's values `[B, T, H, V]`, optionally times an activated gate, flattened to `[B, T, H·V]`."""

    def __init__(self, value_dim: int, affine: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(value_dim, eps=eps, elementwise_affine=affine)

    def forward(self, o: Tensor, gate: Tensor | None = None) -> Tensor:
        o = rms_norm(self.norm, o).flatten(-2)
        return o if gate is None else o * gate

    def decoding_weights(self) -> Norm | None:
        """The norm's parameters; None for one that computes something else."""
        norm = self.norm
        same = type(self) is HeadNorm and type(norm) is nn.RMSNorm
        return Norm(norm.weight, norm.eps) if same and norm.weight is not None and norm.eps is not None else None


def gated_output(norm: HeadNorm, o: Tensor, gate: Tensor, out: nn.Module, by: str = "silu") -> Tensor:
    """out(norm(o, silu(gate))), or by `"sigmoid"`: o `[B, T, H, V]`, gate `[B, T, H·V]` → `[B, T, width]`."""
    if type(norm) is not HeadNorm or not is_unmodified(norm):
        return out(norm(o, gate.sigmoid() if by == "sigmoid" else F.silu(gate)))
    return layer_ops.gated_output(o, gate, norm, norm.norm, out, by)


class WidthNorm(nn.Module):
    """RMSNorm over the values of all heads together, optionally times an activated gate."""

    def __init__(self, heads: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(heads * value_dim, eps=eps)

    def forward(self, o: Tensor, gate: Tensor | None = None) -> Tensor:
        o = rms_norm(self.norm, o.flatten(-2))
        return o if gate is None else o * gate


class HeadLayerNorm(nn.Module):
    """LayerNorm over each head's values with one scale and shift per channel of the full width (RWKV's group norm)."""

    def __init__(self, heads: int, value_dim: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(heads, heads * value_dim, eps=eps)
        if not bias:
            self.norm.register_parameter("bias", None)

    def forward(self, o: Tensor) -> Tensor:
        return self.norm(o.flatten(-2).flatten(0, 1)).unflatten(0, o.shape[:2])
