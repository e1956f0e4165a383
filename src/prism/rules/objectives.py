"""The test-time regression view: a memory learns, at every token, to answer the key with the value.

A rule of this view is one (or several) steps of gradient descent on an objective, after a weight decay `keep`:

    S ← keep ⊙ S;   S ← S - rate · ∂loss/∂S

Memories are key-first, `[K, V]`: the answer to k is Sᵀk. `tests/rules/test_objectives.py` shows by autograd that each rule's
update is exactly that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """A loss of the memory `[…, K, V]` at one key `[…, K]` and value `[…, V]`, and how people write it."""

    text: str
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """None where the rule imitates an objective without being a gradient step on it (PRISM's proxy)."""

    def descend(
        self, S: Tensor, k: Tensor, v: Tensor, rate: float | Tensor = 1.0, keep: float | Tensor = 1.0
    ) -> Tensor:
        """One decayed SGD step, by autograd."""
        if self.loss is None:
            raise ValueError(f"the objective {self.text!r} is a proxy: no gradient step on it gives the update")
        S = (keep * S).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss(S, k, v).sum(), S)
        return (S - rate * gradient).detach()


def answer(S: Tensor, k: Tensor) -> Tensor:
    """Sᵀk: `[…, K, V]`, `[…, K]` → `[…, V]`."""
    return (k.unsqueeze(-2) @ S).squeeze(-2)


def _correlation(S: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return -(answer(S, k) * v).sum(-1)


def _squared_error(S: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 0.5 * (answer(S, k) - v).square().sum(-1)


CORRELATION = Objective("-⟨Sk, v⟩", _correlation)
DECAYED_CORRELATION = Objective("-⟨Sk, v⟩ + decay", _correlation)
REGRESSION = Objective("½‖Sk - v‖²", _squared_error)
DECAYED_REGRESSION = Objective("½‖Sk - v‖² + decay", _squared_error)
REPEATED_REGRESSION = Objective("½‖Sk - v‖², several steps", _squared_error)
GENERALISED_REGRESSION = Objective("generalised ½‖Sk - v‖²")
RESIDUAL_PROXY = Objective("proxy of ½‖σ(Sk) - v‖²")
