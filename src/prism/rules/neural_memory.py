"""Titans and ATLAS: the memory is an MLP M, trained at test time with momentum and weight decay.

    Titans   U_t = η_t U_{t-1} - θ_t ∇‖M_{t-1}(k_t) - v_t‖²
             M_t = (1 - α_t) M_{t-1} + U_t                                   o_t = M_t(q_t)          (Behrouz et al., 2024)
    ATLAS    U_t = μ_t U_{t-1} + ∇ Σ_{t-c < i ≤ t} γ_i ‖M(φ(k_i)) - v_i‖²
             M_t = α_t M_{t-1} - η_t NewtonSchulz(U_t)                       o_t = M_t(φ(q_t))       (Behrouz et al., 2025)

No code was published for either. Our choices for both: a GELU between layers, no biases, learned initial weights of M.
As published, gradients of a mini-batch are taken at the weights it started with.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.networks import InnerUpdate, Momentum
from prism.rules.parts import Carry, ShortConv, at_least_float32, l2_normalize, split_heads
from prism.rules.parts.norms import HeadNorm
from prism.rules.rule import (
    Objective,
    Paper,
    Rule,
    Span,
    check_integers,
    check_nonnegative,
    per_head,
    set_initial_weights,
)
from prism.rules.ttt import FastWeights


class NeuralMemory(Rule):
    """Base of Titans and ATLAS: M, its gates, and the projections around it.

    Subclasses define the inputs of M (`features`) and the optimizer (`learner`).

    Args:
        features: number of inputs of M for a key.
        depth: number of layers of M.
        expand: size of the hidden layers, as a multiple of value_dim.
        mini_batch: b, the number of tokens whose gradients are taken at the same weights.
        momentum: whether gradients are accumulated with momentum.
        base_lr: the largest step of the inner loop. By default 1 / mini_batch, but 1/2 for single tokens with momentum.
        conv_size: number of tokens that the convolution before SiLU and L2 norm sees; 1 means no convolution.
        gate: whether the output is multiplied by SiLU(W x).
    """

    transition = "nonlinear"
    forgetting = "per head, of all weights"
    forms = ("recurrent", "chunkwise")
    shared_maps = ("gate", "out")
    query_first_maps = ("qkv",)

    def __init__(
        self,
        width: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        features: int,
        *,
        depth: int,
        expand: int,
        mini_batch: int,
        momentum: bool,
        base_lr: float | None,
        conv_size: int,
        gate: bool,
    ) -> None:
        super().__init__(width, heads, key_dim, value_dim, write_rank=mini_batch)
        check_integers(depth=depth, expand=expand, mini_batch=mini_batch)
        self.mini_batch = mini_batch
        self.base_lr = default_rate(mini_batch, momentum) if base_lr is None else base_lr
        check_nonnegative(base_lr=self.base_lr)
        self.largest_rate = self.base_lr
        keys, values = heads * key_dim, heads * value_dim
        self.sizes = [keys, keys, values]
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.conv = ShortConv(sum(self.sizes), conv_size)
        self.rate = nn.Linear(width, heads)
        self.decay = nn.Linear(width, heads)
        self.momentum = nn.Linear(width, heads) if momentum else None
        self.fast = FastWeights(heads, [features, *[expand * value_dim] * (depth - 1), value_dim])
        self.state_size = (2 if momentum else 1) * self.fast.size
        self.norm = HeadNorm(value_dim)
        self.gate = nn.Linear(width, values, bias=False) if gate else None
        self.out = nn.Linear(values, width, bias=False)
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        return {"decay.bias": torch.full((self.heads,), math.log(0.99 / 0.01))}  # 1 - α starts at .99

    def features(self, x: Tensor) -> Tensor:
        """φ, `[B, T, H, K]` → `[B, T, H, features]`."""
        return x

    def learner(self, x: Tensor) -> tuple[Tensor, Momentum]:
        """The weight of each example `[B, T, H]`, and the optimizer that is applied to its gradient."""
        log_decay = F.logsigmoid(at_least_float32(self.decay(x)))
        log_momentum = None if self.momentum is None else F.logsigmoid(at_least_float32(self.momentum(x)))
        return self.largest_rate * at_least_float32(self.rate(x)).sigmoid(), Momentum(log_decay, log_momentum)

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[InnerUpdate, dict[str, Tensor], None]:
        mixed, conv_state = self.conv(self.qkv(x), carry.get("conv"), span)
        q, k, v = (split_heads(z, self.heads) for z in mixed.split(self.sizes, -1))
        q, k = (self.features(l2_normalize(z)) for z in (q, k))
        rate, learner = self.learner(x)
        network = self.fast.network(loss_scale=1.0)
        update = InnerUpdate(q, k, v, rate, network, learner, self.mini_batch, span.reset, span.mask)
        return update, {"conv": conv_state}, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out(self.norm(o, None if self.gate is None else F.silu(self.gate(x))))


def default_rate(mini_batch: int, momentum: bool) -> float:
    """The largest step of the inner loop: full steps of single tokens overflow with momentum, which doubles them."""
    return 1 / (max(mini_batch, 2) if momentum else mini_batch)


class Titans(NeuralMemory):
    """Titans: a deep memory with momentum and weight decay.

    M is linear if `depth` is 1. η, θ and α come from the token, one per head. Our choice is θ = base_lr · σ(·) with
    base_lr = 1 / b: the b steps of a mini-batch do not see one another, and with initial weights (σ = ½) all of them together
    make one full step along a unit key (a step is 2θ). With b = 1 and momentum, which adds steps up to twice their size, it is
    1/2: at 1 many untrained layers overflow. Recommenders have 1 there.

    With depth 1, no momentum and b = 1, M_t is Gated DeltaNet's memory, except that the erase sees the undecayed memory.
    """

    name = "titans"
    paper = Paper("Titans", "Behrouz et al. 2024", "https://arxiv.org/abs/2501.00663")
    objective = Objective("‖M(k) - v‖² + decay")

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        depth: int = 2,
        expand: int = 2,
        mini_batch: int = 16,
        momentum: bool = True,
        base_lr: float | None = None,
        conv_size: int = 4,
        gate: bool = True,
    ) -> None:
        key_dim = per_head(width, heads, key_dim)
        super().__init__(
            width,
            heads,
            key_dim,
            per_head(width, heads, value_dim),
            key_dim,
            depth=depth,
            expand=expand,
            mini_batch=mini_batch,
            momentum=momentum,
            base_lr=base_lr,
            conv_size=conv_size,
            gate=gate,
        )


class Polynomial(nn.Module):
    """φ: all products of 1 … `degree` channels, `[…, K]` → `[…, size]`, those of degree i times a learned a_i.

    152 features for 16 channels and degree 2, so keys are short. a_i starts at 1/√(i!).
    """

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
            # Products are sorted by their first channel: those whose channels are all ≥ c are the last ones.
            tails = [math.comb(K - c + degree - 2, degree - 1) for c in range(K)]
            products = torch.cat([x[..., c : c + 1] * products[..., -n:] for c, n in enumerate(tails)], -1)
            powers.append(products)
        return torch.cat([a * p for a, p in zip(self.coefficients.to(x.dtype), powers, strict=True)], -1)


class Atlas(NeuralMemory):
    """ATLAS: Titans with a window of tokens, polynomial keys and orthogonalised steps.

    At every step the memory fits the last c tokens again. Our choices: γ = σ(·)/c, so that a window weighs as much as a token,
    and η = base_lr · σ(·), initially 0.01. With c = 1, degree 1, no Newton-Schulz and η = 1 it is Titans with θ = γ.

    Steps whose size does not shrink with the gradient make a deep M chaotic: rounding errors grow about tenfold in 250
    tokens, and two forms that agree in float64 differ by percents in float32 after a thousand. `depth=1` and
    `newton_schulz=0` avoid that.

    Args:
        key_dim: size of a head's queries and keys before φ; by default 16, or width / heads if that is less.
        window: c, the number of tokens that a step fits.
        degree: degree of φ; 1 leaves the key as it is, except for a learned factor.
        newton_schulz: number of iterations that orthogonalise U; 0 uses U itself.
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
        check_integers(key_dim=K, window=window, degree=degree)
        check_integers(0, newton_schulz=newton_schulz)
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
