"""A memory that solves its regression at every token (Mesa).

    min_S Σ_j ζ_j ‖Sᵀk_j - v_j‖² + Σ_d λ_d ‖S_d‖²     is solved by     S = (G_t + Λ)⁻¹ H_t
    H_t = γ_t H_{t-1} + β_t k_t v_tᵀ          G_t = γ_t G_{t-1} + β_t k_t k_tᵀ          o_t = H_tᵀ (G_t + Λ)⁻¹ q_t

H and G are one linear memory with values [v | k] and state `[B, H, K, V + K]`. Only the read differs:
x_t = (G_t + Λ)⁻¹ q_t by conjugate gradients, all tokens of a chunk at once: G_t p_t for every t is a read of the memory.

Gradients are those of the solution, not of the iterations: with z = (G + Λ)⁻¹ ∂x, another solve, ∂q = z and
∂(G + Λ) = -z xᵀ. The iterations need not be kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prism.engine.inputs import check_integer, check_shape, without_autocast
from prism.engine.linear.block import from_blocks, incoming_states, to_blocks
from prism.engine.linear.decay import HeadDecay
from prism.engine.update import Update, steps_of
from prism.engine.update import check_state as check_linear_state

CHUNK = 64
Operator = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class LeastSquares:
    """The tensors of T tokens, and how each read is solved.

    Args:
        linear: the memory `[H | G]`: it writes β k [v | k]ᵀ, with one decay per head or none, and erases nothing.
        ridge: Λ, `[H, K]`, positive.
        iterations: number of conjugate-gradient iterations.
    """

    linear: Update
    ridge: Tensor
    iterations: int = 30

    def __post_init__(self) -> None:
        u = self.linear
        if u.erases or u.per_channel or u.writes != 1 or u.substeps != 1 or u.read != "after":
            raise ValueError("linear must be a plain write per token, with one decay per head and no erase")
        if u.value_dim <= u.key_dim:
            raise ValueError(f"linear must write [v | k], V + K = more than K = {u.key_dim} values, got {u.value_dim}")
        check_shape("ridge", self.ridge, (u.heads, u.key_dim), "[H, K]")
        check_integer("iterations", self.iterations)

    @property
    def tokens(self) -> int:
        return self.linear.tokens

    @property
    def value_dim(self) -> int:
        return self.linear.value_dim - self.linear.key_dim


def recurrent(update: LeastSquares, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition, one token after the other. Returns `[B, T, H, V]` and the memory `[B, H, K, V + K]`."""
    steps, V = steps_of(update.linear), update.value_dim
    S = steps.initial(state)
    ridge = update.ridge.to(S.dtype).unsqueeze(1)  # [H, 1, K]
    outputs = []
    for t in range(steps.rows):
        if steps.reset is not None:
            S = torch.where(steps.reset[:, t, None, None, None], 0.0, S)
        if steps.log_decay is not None:
            S = steps.log_decay[:, t].exp()[..., None, None] * S
        S = S + steps.k[:, t].transpose(-1, -2) @ steps.w[:, t]
        x = solve(_by_matrix, (S[..., V:], ridge), steps.q[:, t].unsqueeze(-2), update.iterations)
        outputs.append((x @ S[..., :V]).squeeze(-2))
    return steps.read(torch.stack(outputs, 1)), S


def chunkwise(update: LeastSquares, state: Tensor | None = None, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Chunks of `chunk` tokens in matrix products; one solve for all tokens."""
    steps, V = steps_of(update.linear), update.value_dim
    rows = to_blocks(steps, min(chunk, steps.rows))
    incoming, S = incoming_states(rows, steps.initial(state))
    decay = rows.decay()
    assert isinstance(decay, HeadDecay)
    left = decay.from_start(torch.ones_like(rows.q[..., :1]), before=False)  # [B, H, N, C, 1]
    shared = (left, rows.k.squeeze(-3), decay.weights(strict=False, before=False))
    written, ridge = rows.w.squeeze(-3), update.ridge.to(S.dtype)[:, None, None]  # [H, 1, 1, K]
    x = solve(_by_chunk, (*shared, incoming[..., V:], written[..., V:], ridge), rows.q, update.iterations)
    o = _seen(x, *shared, incoming[..., :V], written[..., :V])
    return steps.read(from_blocks(o, steps.rows)), S


def check_state(update: LeastSquares, state: Tensor | None) -> None:
    check_linear_state(update.linear, state)


def solve(operator: Operator, tensors: tuple[Tensor, ...], b: Tensor, iterations: int) -> Tensor:
    """Solve operator(x, *tensors) = b for x, differentiably in b and the tensors.

    The operator must be linear in x, symmetric and positive.
    """
    with torch.no_grad():
        x = conjugate_gradients(lambda p: operator(p, *tensors), b, iterations)
    # b - A x is zero except for rounding; its derivatives are those of b and -A, from which the solution's follow.
    return _Solution.apply(b - operator(x, *tensors), x, operator, iterations, *tensors)


def conjugate_gradients(apply: Callable[[Tensor], Tensor], b: Tensor, iterations: int) -> Tensor:
    """Solve A x = b with `apply(p)` = A p. Vectors are the last dimension; all others are independent systems."""
    tiny = torch.finfo(b.dtype).tiny
    x, r, p = torch.zeros_like(b), b, b
    size = r.square().sum(-1, keepdim=True)
    for _ in range(iterations):
        Ap = apply(p)
        step = size / (p * Ap).sum(-1, keepdim=True).clamp(min=tiny)
        x, r = x + step * p, r - step * Ap
        new = r.square().sum(-1, keepdim=True)
        p, size = r + new / size.clamp(min=tiny) * p, new
    return x


class _Solution(torch.autograd.Function):
    """Returns x; the backward pass maps its gradient to the residual by one more solve."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, operator: Operator, iterations: int, *tensors: Tensor) -> Tensor:
        ctx.operator, ctx.iterations = operator, iterations
        ctx.save_for_backward(*tensors)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True; the residual's derivative treats x as constant
            raise NotImplementedError(
                "LeastSquares (rule mesa) has no second derivatives: call backward without create_graph"
            )
        tensors = ctx.saved_tensors
        # Autocast is on here if `backward()` was called inside an autocast block.
        z = without_autocast(conjugate_gradients, lambda p: ctx.operator(p, *tensors), gradients[0], ctx.iterations)
        return (z, *[None] * (3 + len(tensors)))


def _by_matrix(p: Tensor, G: Tensor, ridge: Tensor) -> Tensor:
    """`[B, H, 1, K]`: (G + Λ) p."""
    return p @ G + ridge * p


def _by_chunk(p: Tensor, left: Tensor, k: Tensor, weights: Tensor, G: Tensor, written: Tensor, ridge: Tensor) -> Tensor:
    """`[B, H, N, C, K]`: (G_t + Λ) p_t for every token, without forming G_t."""
    return _seen(p, left, k, weights, G, written) + ridge * p


def _seen(p: Tensor, left: Tensor, k: Tensor, weights: Tensor, S: Tensor, written: Tensor) -> Tensor:
    """S_tᵀ p_t: from the chunk's incoming state, and from the writes of its tokens."""
    return (p * left) @ S + ((p @ k.transpose(-1, -2)) * weights) @ written
