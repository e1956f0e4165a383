"""The test-time regression view, by autograd: a rule's update is a (decayed) SGD step on the objective it states.

Uses the real rule's update at one token, from a random incoming state.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import prism
from prism import Update, rules
from prism.rules.rule import Span
from tests.helpers import assert_close
from tests.rules.rule_cases import WIDTH, perturbed_rule

HEBBIAN = ["linear", "retnet", "lightning", "gated_retention", "mamba2", "mamba3", "gla", "hgrn2", "rwkv6"]
DELTA: list[tuple[str, dict[str, Any]]] = [
    ("delta", {}),
    ("delta", {"negative_eigenvalues": True}),
    ("efla", {}),
    ("gated_delta", {}),
    ("kda", {}),
    ("prism", {"steps": 1}),
    ("delta_product", {"householders": 1}),
    ("delta_product", {"householders": 3}),
    ("delta_product", {"householders": 2, "forget_gate": True}),
]


def one_token(rule: rules.Rule) -> tuple[Update, Tensor]:
    """The second token's update: the first one is carried, by rules that look back."""
    first, second = torch.randn(2, 3, 1, WIDTH, dtype=torch.float64)
    update, _, _ = rule.update(second, rule.update(first, {}, Span())[1], Span())
    return update, torch.randn(3, rule.heads, rule.key_dim, rule.value_dim, dtype=torch.float64)


def keep(update: Update) -> Tensor | float:
    """exp(g) of the token, to multiply a memory `[B, H, K, V]` with."""
    if update.log_decay is None:
        return 1.0
    g = update.log_decay[:, 0]
    return g.exp().reshape(*g.shape, *[1] * (4 - g.ndim))


def row(update: Update, name: str, index: int) -> Tensor:
    """A tensor of one sub-step, `[B, H, …]`, with all heads."""
    z = getattr(update, name)[:, index]
    return z.repeat_interleave(update.heads // z.shape[1], 1)


@pytest.mark.parametrize("name", HEBBIAN)
def test_adding_is_a_step_on_the_correlation(name: str) -> None:
    rule = perturbed_rule(name, torch.float64)
    update, state = one_token(rule)
    assert (update.log_decay is None) == (rule.objective.text == "-⟨Sᵀk, v⟩")
    writes = zip(row(update, "k", 0).unbind(2), row(update, "w", 0).unbind(2), strict=True)
    expected, kept = state, keep(update)
    for k, v in writes:
        expected, kept = rule.objective.descend(expected, k, v, rate=1.0, keep=kept), 1.0
    assert_close(name, prism.memory(update, state)[1], expected, 1e-12)


@pytest.mark.parametrize(("name", "options"), DELTA, ids=["-".join([n, *map(str, o)]) for n, o in DELTA])
def test_delta_rules_are_steps_on_the_squared_error(name: str, options: dict[str, Any]) -> None:
    rule = perturbed_rule(name, torch.float64, **options)
    # PRISM states the objective it imitates; with one step it is Gated DeltaNet, whose objective it then descends.
    objective = rules.get("gated_delta").objective if name == "prism" else rule.objective
    update, state = one_token(rule)
    expected, kept = state, keep(update)
    for step in range(update.substeps):
        rate = row(update, "erase_strength", step)[..., None, None]
        k, v = row(update, "k", step).squeeze(2), row(update, "w", step).squeeze(2) / rate.squeeze(-1)
        expected = objective.descend(expected, k, v, rate=rate, keep=kept if step == 0 else 1.0)
    assert update.substeps == rule.write_rank
    assert_close(name, prism.memory(update, state)[1], expected, 1e-12)


def test_every_gradient_rule_of_the_family_is_shown_here() -> None:
    shown = {*HEBBIAN, *(name for name, _ in DELTA)}
    stated = {name for name in rules.names() if rules.get(name).objective.loss is not None}
    assert stated <= shown


def test_weight_decay_is_the_gradient_of_a_penalty() -> None:
    """keep ⊙ S is what a step on ½λ‖S‖² leaves, with λ = 1 - keep: the decay is the objective's pull to zero."""
    rule = perturbed_rule("gla", torch.float64)
    update, state = one_token(rule)
    kept = keep(update)
    S = state.clone().requires_grad_()
    penalty = 0.5 * ((1 - kept) * S.square()).sum()
    (gradient,) = torch.autograd.grad(penalty, S)
    silent = Update(update.q, update.k, torch.zeros_like(update.w), update.log_decay)
    assert_close("decay", prism.memory(silent, state)[1], state - gradient, 1e-12)


def test_proxies_have_no_gradient_step() -> None:
    for name in ("prism", "rwkv7", "gdn2", "comba"):
        with pytest.raises(ValueError, match="proxy"):
            rules.get(name).objective.descend(torch.zeros(2, 2), torch.zeros(2), torch.zeros(2))
