"""Weight decay groups, Muon, and updates skipped on the device."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism.models import PrismConfig, PrismForCausalLM
from prism.train.optimizer import Muon, Optimizers, orthogonalize
from prism.train.settings import OptimizerSettings
from tests.train.standin import Standin


def names(optimizers: Optimizers, model: torch.nn.Module) -> dict[tuple[str, float], set[str]]:
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    return {
        (type(optimizer).__name__, group["weight_decay"]): {by_parameter[p] for p in group["params"]}
        for optimizer in optimizers.all
        for group in optimizer.param_groups
    }


def test_gates_norms_and_biases_are_not_decayed_and_hidden_matrices_go_to_muon() -> None:
    config = PrismConfig(64, 32, 2, "prism+mamba2", rule_options={"prism": {"steps": 2}})
    model = PrismForCausalLM(config)
    groups = names(Optimizers(model, OptimizerSettings("muon", weight_decay=0.3)), model)
    assert set(groups) == {("AdamW", 0.3), ("AdamW", 0.0), ("Muon", 0.3)}
    assert sum(map(len, groups.values())) == len(list(model.parameters()))
    exempt = groups["AdamW", 0.0]
    for ending in ("A_log", "dt_bias", "norm.weight", "gamma", "skip"):
        of_kind = {name for name, _ in model.named_parameters() if name.endswith(ending)}
        assert of_kind <= exempt, ending
    assert any(name.endswith("A_log") for name in exempt)
    assert groups["AdamW", 0.3] >= {"model.embed_tokens.weight"}
    matrices = groups["Muon", 0.3]
    assert "model.layers.0.mlp.up.weight" in matrices and not any(
        "embed" in name or "head" in name for name in matrices
    )
    plain = names(Optimizers(model, OptimizerSettings("adamw", weight_decay=0.3)), model)
    assert plain["AdamW", 0.3] == groups["AdamW", 0.3] | matrices


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_group_has_its_own_learning_rate_and_weight_decay(name: Literal["adamw", "muon"]) -> None:
    model = PrismForCausalLM(PrismConfig(64, 32, 2, "prism"))
    groups = ("*.writes.key.*=lr:0.5,wd:0", "*.writes.*=wd:0.2", "*.writes.key.up.*=lr:9", "model.embed*=lr:2")
    settings = OptimizerSettings(name, lr=0.1, weight_decay=0.3, groups=groups[:2] + groups[3:])
    optimizers = Optimizers(model, settings)
    optimizers.step(0.5)
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        by_parameter[parameter].removeprefix("model.layers.0.mixer.rule."): (group["lr"], group["weight_decay"])
        for optimizer in optimizers.all
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert len(found) == len(by_parameter)
    assert found["writes.key.up.weight"] == (0.5 * 0.1 * 0.5, 0.0)
    assert found["writes.gain.up.weight"] == (0.1 * 0.5, 0.2)
    assert found["writes.scale"] == (0.1 * 0.5, 0.0), "gates are never decayed"
    assert found["model.embed_tokens.weight"] == (2 * 0.1 * 0.5, 0.3)
    assert found["qkv.weight"] == (0.1 * 0.5, 0.3)
    for pattern in ("writes=lr:2", groups[2]):  # it matches no whole name; another comes before it
        with pytest.raises(ValueError, match="which no parameter takes: a pattern must match whole names such as"):
            Optimizers(model, replace(settings, groups=(*settings.groups, pattern)))


def test_without_groups_nothing_changes() -> None:
    """The same updates, bit by bit, as with a group whose rates are those of all."""
    ends = []
    for groups in ((), ("*.up.*=lr:1,wd:0.1",)):
        torch.manual_seed(0)
        model = Standin(8, 4, 1, 0.0)
        optimizers = Optimizers(model, OptimizerSettings(groups=groups))
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizers.step(1.0)
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@given(
    rows=st.integers(1, 24), columns=st.integers(1, 24), scale=st.sampled_from([1e-6, 1.0, 1e6]), seed=st.integers(0, 9)
)
def test_orthogonalize_makes_singular_values_near_one(rows: int, columns: int, scale: float, seed: int) -> None:
    left = torch.linalg.qr(torch.randn(rows, rows, generator=torch.Generator().manual_seed(seed)))[0]
    right = torch.linalg.qr(torch.randn(columns, columns, generator=torch.Generator().manual_seed(seed + 1)))[0]
    n = min(rows, columns)
    x = left[:, :n] @ torch.diag(torch.linspace(0.5, 1.0, n) * scale) @ right[:n]
    y = orthogonalize(x)
    values = torch.linalg.svdvals(y)
    assert y.shape == x.shape and values.min() > 0.6 and values.max() < 1.3
    # The singular vectors stay: x yᵀ is symmetric and positive.
    product = x @ y.T / scale
    torch.testing.assert_close(product, product.T, atol=1e-3, rtol=1e-3)


def test_muon_takes_matrices_only_and_learns() -> None:
    with pytest.raises(ValueError, match="matrices only"):
        Muon([torch.nn.Parameter(torch.ones(3))], 0.1)
    target, weight = torch.randn(8, 5), torch.nn.Parameter(torch.zeros(8, 5))
    muon = Muon([weight], 0.1, weight_decay=0.0)
    losses = []
    for _ in range(60):
        loss = (weight - target).square().mean()
        loss.backward()
        muon.step()
        muon.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 20


def test_the_learning_rate_is_what_the_step_says() -> None:
    model = Standin(8, 4, 1, 0.0)
    optimizers = Optimizers(model, OptimizerSettings(lr=0.1, weight_decay=0.5, betas=(0.0, 0.0)))
    before = model.layers[0].down.weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step(0.5)
    torch.testing.assert_close(model.layers[0].down.weight.detach(), before * (1 - 0.1 * 0.5 * 0.5))


@given(
    skips=st.lists(st.booleans(), min_size=1, max_size=6),
    fault=st.sampled_from([math.nan, math.inf, 0.0]),
    name=st.sampled_from(["adamw", "muon"]),
)
def test_a_skip_on_the_device_is_a_step_not_made(skips: list[bool], fault: float, name: str) -> None:
    """Weights and states equal, bit by bit, those of a run in which the host leaves the skipped steps out."""
    torch.manual_seed(0)
    host = Standin(8, 4, 1, 0.0)
    device = copy.deepcopy(host)
    settings = OptimizerSettings(name, lr=0.1, weight_decay=0.5)
    on_host, on_device = Optimizers(host, settings), Optimizers(device, settings)
    for number, skip in enumerate(skips, 1):
        for one, other in zip(host.parameters(), device.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad * fault if skip else one.grad.clone()
        if not skip:
            on_host.step(1 / number)
        on_device.step(1 / number, torch.tensor(float(skip)))
    for (name, one), other in zip(host.named_parameters(), device.parameters(), strict=True):
        assert torch.equal(one, other), name
    for (optimizer, one), (twin, other) in zip(on_host.parameters(), on_device.parameters(), strict=True):
        for key, value in twin.state[other].items():  # before the first update the host has no state: zeros
            assert torch.equal(optimizer.state[one].get(key, torch.zeros_like(value)), value), key
