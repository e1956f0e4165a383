"""Muon's orthogonalisation: every singular value of a matrix moves towards 1, by matrix products alone."""

from __future__ import annotations

from torch import Tensor

COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # of Jordan et al. (2024): steep at 0, singular values end up in about [.7, 1.2]

EPS = 1e-6


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """`[…, K, V]` → `[…, K, V]`: X ← aX + (bXXᵀ + c(XXᵀ)²)X from X/‖X‖, `steps` times."""
    a, b, c = COEFFICIENTS
    flat = x.transpose(-1, -2) if x.shape[-2] > x.shape[-1] else x
    # Epsilon inside the root: next to nothing is not made a full step, and the slope there stays finite.
    flat = flat * (flat.square().sum((-2, -1), keepdim=True) + EPS).rsqrt()
    for _ in range(steps):
        gram = flat @ flat.transpose(-1, -2)
        flat = a * flat + (b * gram + c * gram @ gram) @ flat
    return flat.transpose(-1, -2) if x.shape[-2] > x.shape[-1] else flat
