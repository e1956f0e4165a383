"""The network inside a memory: its answers, and the gradient of its loss with respect to its weights.

    z_1 = x W_1 + b_1     x_{l+1} = gelu(z_l)     z_{l+1} = x_{l+1} W_{l+1} + b_{l+1}     f(x) = [x +] [LayerNorm](z_L)

One layer is a linear memory. The loss of a token is ½‖f(k) - v‖² (TTT) or ‖f(k) - v‖² (Titans). A token's gradient has rank
one in every layer, x_l δ_lᵀ with δ_l = ∂loss/∂z_l, and δ_l for b_l: `gradient` returns the x and the δ, never their product.
It is written out by hand, LayerNorm included, so that the outer autograd goes through plain matrix products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = tuple[Tensor, ...]
"""Of one network per row and head: W_1 … W_L `[B, H, in, out]`, then, if there are any, b_1 … b_L `[B, H, 1, out]`."""

LN_EPS = 1e-6

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan et al. (2024): steep at 0; singular values end up in about [.7, 1.2]."""
NEWTON_SCHULZ_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class Network:
    """The function f, its loss, and its initial weights.

    Args:
        weights: W_1 … W_L at the start of a document, `[H, in, out]` each.
        biases: b_1 … b_L, `[H, out]` each; None leaves them out.
        norm: scale and shift `[H, V]` of a LayerNorm on the answer, the same for every token; None leaves it out.
        residual: whether x is added to the answer (keys and values then have the same size).
        loss_scale: 0.5 for ½‖f(k) - v‖², 1 for ‖f(k) - v‖².
    """

    weights: Weights
    biases: Weights | None = None
    norm: tuple[Tensor, Tensor] | None = None
    residual: bool = False
    loss_scale: float = 0.5

    @property
    def depth(self) -> int:
        return len(self.weights)

    def start(self, dtype: torch.dtype) -> Weights:
        """The weights of a new document, `[1, H, …]`: the same for every row."""
        biases = () if self.biases is None else tuple(b.unsqueeze(-2) for b in self.biases)
        return tuple(w.to(dtype).unsqueeze(0) for w in (*self.weights, *biases))

    def affine(self, weights: Weights, layer: int, x: Tensor) -> Tensor:
        """x W_l + b_l: `[…, n, in]` → `[…, n, out]`."""
        z = x @ weights[layer]
        return z if self.biases is None else z + weights[self.depth + layer]

    def logits(self, weights: Weights, x: Tensor) -> Tensor:
        """z_L `[…, n, V]`, the output before norm and residual, for x `[…, n, K]`."""
        for layer in range(self.depth):
            x = self.affine(weights, layer, gelu(x) if layer else x)
        return x

    def answer(self, z: Tensor, x: Tensor) -> Tensor:
        """f(x) from z_L."""
        if self.norm is not None:
            scale, shift = (p.to(z.dtype).unsqueeze(-2) for p in self.norm)
            z = normalize(z)[0] * scale + shift
        return x + z if self.residual else z

    def gradient(self, weights: Weights, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """x_l `[…, n, in]` and δ_l `[…, n, out]` of every layer, for n examples k `[…, n, K]`, v `[…, n, V]`."""
        inputs, before = [k], []
        for layer in range(self.depth):
            before.append(self.affine(weights, layer, inputs[-1]))
            if layer + 1 < self.depth:
                inputs.append(gelu(before[-1]))
        deltas = [self.output_gradient(before[-1], k, v)]
        for layer in reversed(range(self.depth - 1)):
            deltas.append((deltas[-1] @ weights[layer + 1].transpose(-1, -2)) * gelu_slope(before[layer]))
        return inputs, deltas[::-1]

    def output_gradient(self, z: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """∂loss/∂z_L."""
        target = v - k if self.residual else v
        if self.norm is None:
            return 2 * self.loss_scale * (z - target)
        scale, shift = (p.to(z.dtype).unsqueeze(-2) for p in self.norm)
        normal, inverse = normalize(z)
        error = 2 * self.loss_scale * (normal * scale + shift - target)
        return normalize_backward(error * scale, normal, inverse)


def outer(network: Network, inputs: list[Tensor], deltas: list[Tensor], weight: Tensor) -> Weights:
    """Σ_j weight_j · (gradient of example j), as weights; `weight` is `[…, n, 1]`."""
    scaled = [weight * delta for delta in deltas]
    gradients = [x.transpose(-1, -2) @ delta for x, delta in zip(inputs, scaled, strict=True)]
    if network.biases is not None:
        gradients += [delta.sum(-2, keepdim=True) for delta in scaled]
    return tuple(gradients)


def normalize(z: Tensor) -> tuple[Tensor, Tensor]:
    """(z - mean) / sqrt(variance + ε) over the last dimension, and 1 / sqrt(variance + ε)."""
    centred = z - z.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + LN_EPS)
    return centred * inverse, inverse


def normalize_backward(grad: Tensor, normal: Tensor, inverse: Tensor) -> Tensor:
    """∂/∂z of Σ grad · normal: `grad` without its mean and its part along `normal`, times `inverse`."""
    along = (grad * normal).mean(-1, keepdim=True)
    return (grad - grad.mean(-1, keepdim=True) - normal * along) * inverse


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """Move every singular value of x `[…, K, V]` towards 1, by matrix products alone (Muon's Newton-Schulz iteration).

    X ← aX + (bXXᵀ + c(XXᵀ)²)X from X/‖X‖, `steps` times.
    """
    a, b, c = NEWTON_SCHULZ
    flat = x.transpose(-1, -2) if x.shape[-2] > x.shape[-1] else x
    # Epsilon inside the root: a tiny x is not scaled up to a full step, and the slope there stays finite.
    flat = flat * (flat.square().sum((-2, -1), keepdim=True) + NEWTON_SCHULZ_EPS).rsqrt()
    for _ in range(steps):
        gram = flat @ flat.transpose(-1, -2)
        flat = a * flat + (b * gram + c * gram @ gram) @ flat
    return flat.transpose(-1, -2) if x.shape[-2] > x.shape[-1] else flat


def gelu(x: Tensor) -> Tensor:
    """The tanh approximation, whose derivative is `gelu_slope`."""
    return F.gelu(x, approximate="tanh")


def gelu_slope(x: Tensor) -> Tensor:
    """Derivative of the tanh GELU ½x(1 + tanh u), u = √(2/π)(x + 0.044715x³)."""
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    t = torch.tanh(scale * x * (1 + cubic * square))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (scale * (1 + 3 * cubic * square))
