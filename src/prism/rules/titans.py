"""Titans: a deep memory that learns with momentum and forgets by weight decay.

    U_t = η_t U_{t-1} - θ_t ∇‖M_{t-1}(k_t) - v_t‖²      M_t = (1 - α_t) M_{t-1} + U_t      o_t = M_t(q_t)      (Behrouz 2024)

M is an MLP, linear if `depth` is 1; η, θ, α come from the token, one per head. As published, gradients of a mini-batch are
taken at its first weights. No code was published; ours are: a GELU between layers, no biases, learned first weights, and
θ = base_lr · σ(·) with base_lr = 1 / b: the b steps of a mini-batch do not see one another, and at the start (σ = ½) all of
them together make one full step along a unit key (a step is 2θ). Linear, without momentum and with b = 1, M_t is the gated
delta rule's but for what the erase sees: the undecayed memory.
"""

from __future__ import annotations

from prism.rules.neural_memory import NeuralMemory
from prism.rules.objectives import Objective
from prism.rules.rule import Paper, per_head


class Titans(NeuralMemory):
    """Titans: a deep memory with momentum and weight decay."""

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
