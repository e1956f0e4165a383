"""Initial weights in a model: every parameter is initialised, by its rule where the rule says how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prism import Mixer, rules
from prism.models import PrismConfig, PrismForCausalLM
from prism.nn.parameters import initial_weights
from prism.rules.delta import GatedDelta
from prism.rules.rule import set_initial_weights


class Replaced(GatedDelta):
    """Replaces one weight, by a parameter that was written to as often as torch writes to a linear map's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.beta.weight = nn.Parameter(torch.empty(heads, width).fill_(0.25))
        self.offset = nn.Parameter(torch.empty(heads))
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        return {"beta.weight": torch.full((self.heads, self.width), 0.25), "offset": torch.arange(self.heads) + 1.0}


class Silent(GatedDelta):
    """Has a parameter that it says nothing about."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.offset = nn.Parameter(torch.ones(heads))


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_REGISTERED", {})
    for kind in (Replaced, Silent):
        monkeypatch.setattr(kind, "name", kind.__name__)


def model(rule: Any, **options: Any) -> PrismForCausalLM:
    return PrismForCausalLM(PrismConfig(16, 16, 2, layers=[(rule, options)] * 2, initializer_range=0.02))


@pytest.mark.parametrize("meta", [False, True])
def test_a_weight_that_a_rule_replaced_starts_as_the_rule_says(meta: bool) -> None:
    rules.register("replaced", Replaced)
    with torch.device("meta" if meta else "cpu"):
        lm = model("replaced")
    if meta:
        lm.to_empty(device="cpu")
        lm.init_weights()
    for layer in lm.model.layers:
        rule: Any = layer.mixer.rule
        assert torch.equal(rule.beta.weight, torch.full((2, 16), 0.25))
        assert torch.equal(rule.offset, torch.tensor([1.0, 2.0]))
        assert rule.qkv.weight.std() < 0.03  # left to the configuration


def test_each_memory_of_a_mixture_starts_as_its_rule_says() -> None:
    rules.register("replaced", Replaced)
    rule: Any = model("mom", inner="replaced").model.layers[0].mixer.rule
    assert all(torch.equal(one.weight, torch.full((2, 16), 0.25)) for one in rule.inner.beta.maps)
    rwkv: Any = model("mom", inner="rwkv7").model.layers[0].mixer.rule.inner
    first, second = rwkv.rate.up.maps[:2]
    assert torch.equal(first.bias, second.bias) and not torch.equal(first.weight, second.weight)


def test_a_parameter_that_nobody_initialises_is_refused() -> None:
    rules.register("silent", Silent)
    Mixer("silent", 16, 2)  # which keeps what the constructor wrote
    with pytest.raises(
        ValueError, match=r"rule 'silent' does not initialise its parameter 'offset': return a value from"
    ):
        model("silent")


@pytest.mark.parametrize("name", rules.names())
def test_a_rule_is_not_built_again_and_draws_the_same_from_the_same_seed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        rule = rules.get(name).build(16, 2)
    monkeypatch.setattr(rules.get(name), "build", None)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(initial_weights(rule))
    parameters = dict(rule.named_parameters())
    for place, value in drawn[0].items():
        assert torch.equal(value, drawn[1][place]) and value.shape == parameters[place].shape
        assert value.device.type == "cpu" and value.isfinite().all()
