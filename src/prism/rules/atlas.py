"""ATLAS: at every step the memory looks at a window of tokens again, with richer keys and a better optimiser than Titans.

    U_t = μ_t U_{t-1} + ∇ Σ_{t-c < i ≤ t} γ_i ‖M(φ(k_i)) - v_i‖²   M_t = α_t M_{t-1} - η_t NewtonSchulz(U_t)   (Behrouz 2025)

φ(x) holds the products of up to `degree` channels of x, each degree times a learned number: 152 numbers for 16 channels
and degree 2, so keys are short. No code was published; ours are: γ = σ(·)/c, so that a window weighs as much as a token,
η = base_lr · σ(·), 0.01 at the start, first coefficients 1/√(i!), and what Titans leaves open. With c = 1, degree 1, no
Newton-Schulz and η = 1 it is Titans with θ = γ.

Steps whose size does not shrink with the gradient make a deep M chaotic: rounding grows about tenfold in 250 tokens, and two
forms that are one in float64 are percents apart in float32 after a thousand. Neither `depth=1` nor `newton_schulz=0` does that.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from prism.engine.networks import Momentum
from prism.rules.initial import set_initial_weights
from prism.rules.neural_memory import NeuralMemory
from prism.rules.objectives import Objective
from prism.rules.parts import at_least_float32
from prism.rules.rule import Paper, check_whole, per_head


class Polynomial(nn.Module):
    """All products of 1 … `degree` channels, `[…, K]` → `[…, size]`, those of degree i times a learned a_i."""

    def __init__(self, channels: int, degree: int) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(torch.empty(degree))
        self.size = math.comb(channels + degree, degree) - 1
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        degrees = range(1, len(self.coefficients) + 1)
        return {"coefficients": torch.tensor([math.factorial(i) ** -0.5 for i in degrees])}

    def forward(self, x: Tensor) -> Tensor:
        K = x.shape[-1]
        products, powers = x, [x]
        for degree in range(2, len(self.coefficients) + 1):
            # Sorted by their first channel: the products whose channels are all ≥ c are the last so many.
            tails = [math.comb(K - c + degree - 2, degree - 1) for c in range(K)]
            products = torch.cat([x[..., c : c + 1] * products[..., -n:] for c, n in enumerate(tails)], -1)
            powers.append(products)
        return torch.cat([a * p for a, p in zip(self.coefficients.to(x.dtype), powers, strict=True)], -1)


class Atlas(NeuralMemory):
    """ATLAS: Titans with a window of tokens, polynomial keys and orthogonalised steps.

    Args:
        key_dim: size of a head's queries and keys before φ; by default 16, or width / heads if that is less.
        window: c, the number of tokens that a step looks at.
        degree: degree of φ; 1 leaves the key as it is, but for a learned factor.
        newton_schulz: iterations that orthogonalise U; 0 takes U itself.
        base_lr: the largest step of the inner loop.
    """

    name = "atlas"
    paper = Paper("ATLAS", "Behrouz et al. 2025", "https://arxiv.org/abs/2505.23735")
    objective = Objective("Σ_window ‖M(φ(k)) - v‖² + decay")

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        window: int = 8,
        degree: int = 2,
        newton_schulz: int = 5,
        depth: int = 2,
        expand: int = 1,
        mini_batch: int = 16,
        momentum: bool = True,
        base_lr: float = 0.02,
        conv_size: int = 4,
        gate: bool = True,
    ) -> None:
        K, V = min(16, per_head(width, heads, None)) if key_dim is None else key_dim, per_head(width, heads, value_dim)
        check_whole(key_dim=K, window=window, degree=degree)
        check_whole(0, newton_schulz=newton_schulz)
        polynomial = Polynomial(K, degree)
        super().__init__(
            width,
            heads,
            K,
            V,
            polynomial.size,
            depth=depth,
            expand=expand,
            mini_batch=mini_batch,
            momentum=momentum,
            base_lr=base_lr,
            conv_size=conv_size,
            gate=gate,
        )
        self.polynomial, self.window, self.newton_schulz = polynomial, window, newton_schulz
        self.write_rank, self.largest_rate = window, 1 / window
        self.step = nn.Linear(width, heads)
        self.state_size += heads * (window - 1) * (polynomial.size + V + 1)

    def features(self, x: Tensor) -> Tensor:
        return self.polynomial(x)

    def learner(self, x: Tensor) -> tuple[Tensor, Momentum]:
        rate, plain = super().learner(x)
        step = self.base_lr * at_least_float32(self.step(x)).sigmoid()
        return rate, replace(plain, step=step, window=self.window, newton_schulz=self.newton_schulz)
