"""How long untrained heads remember: the option `timescales` of the delta rules that decay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from prism import rules
from prism.models import PrismConfig, PrismForCausalLM
from prism.nn import Mixer
from prism.rules.parts.decays import SoftplusDecay


def remembered(decay: SoftplusDecay) -> list[float]:
    """Tokens in which heads (or their channels) forget by a factor e if nothing of the input speaks."""
    rate = decay.A_log.exp().repeat_interleave(decay.channels)
    return (1 / (rate * F.softplus(decay.dt_bias.double()))).tolist()


@given(st.integers(2, 16), st.floats(0.5, 100), st.floats(1, 1e4))
def test_heads_are_spread_evenly_in_log(heads: int, first: float, factor: float) -> None:
    last = first * factor
    found = remembered(SoftplusDecay(heads, timescales=(first, last)))
    assert found[0] == pytest.approx(first, rel=1e-3) and found[-1] == pytest.approx(last, rel=1e-3)
    steps = torch.tensor(found).log().diff()
    torch.testing.assert_close(steps, torch.full_like(steps, math.log(factor) / (heads - 1)), atol=2e-3, rtol=1e-3)


def test_a_single_head_gets_the_geometric_mean_and_channels_that_of_their_head() -> None:
    assert remembered(SoftplusDecay(1, timescales=[1, 1024])) == pytest.approx([32], rel=1e-4)
    assert remembered(SoftplusDecay(1, 3, timescales=(4, 4))) == pytest.approx([4] * 3, rel=1e-4)


RULES = [name for name in rules.names() if "timescales" in rules.get(name).option_names()]


@pytest.mark.parametrize("rule", RULES)
def test_spread_heads_do_not_depend_on_the_seed_and_drawn_ones_do(rule: str) -> None:
    gated = {"forget_gate": True} if rule == "delta_product" else {}

    def one(seed: int, **options: object) -> list[float]:
        torch.manual_seed(seed)
        decay = Mixer(rule, 32, 4, **gated, **options).rule.decay
        return remembered(decay)[:: decay.channels]

    assert one(0, timescales=(2, 16)) == one(1, timescales=(2, 16)) == pytest.approx([2, 4, 8, 16], rel=1e-4)
    assert one(0, timescales="drawn") != one(1, timescales="drawn")
    assert (one(0) == one(1)) == (rule == "prism")  # the others as published


@pytest.mark.parametrize(
    ("rule", "options", "says"),
    [
        ("delta_product", {}, "set forget_gate=True, or omit them"),
        ("kda", {"lower_bound": -5.0}, "omit them, or lower_bound"),
    ],
)
def test_a_rule_without_such_a_decay_refuses_them(rule: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Mixer(rule, 32, 4, timescales=(2, 16), **options)


def test_drawn_prism_of_rank_1_starts_as_gated_delta() -> None:
    torch.manual_seed(3)
    delta = Mixer("gated_delta", 32, 4)
    torch.manual_seed(3)
    drawn = Mixer("prism", 32, 4, steps=1, timescales="drawn", start="drawn")
    for name, weight in delta.state_dict().items():
        torch.testing.assert_close(drawn.state_dict()[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize("wrong", ["random", [4], [1, 2, 3], [0, 4], [1, math.inf], [1, "x"], None, 8])
def test_other_values_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="timescales must be 'drawn' or two numbers of tokens above 0, got "):
        Mixer("prism", 32, 4, timescales=wrong)


def test_a_model_starts_with_them_and_its_configuration_keeps_them(tmp_path: object) -> None:
    config = PrismConfig(
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=1,
        num_heads=4,
        rule_options={"prism": {"timescales": (2, 16)}},
    )
    model = PrismForCausalLM(config)
    decay = model.model.layers[0].mixer.rule.decay
    assert remembered(decay) == pytest.approx([2, 4, 8, 16], rel=1e-4)
    with torch.no_grad():
        decay.dt_bias += 1
    model.save_pretrained(tmp_path)
    again = PrismForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again.model.layers[0].mixer.rule.decay.dt_bias, decay.dt_bias, rtol=0, atol=0)
    assert list(again.config.rule_options["prism"]["timescales"]) == [2, 16]


@pytest.mark.parametrize(("name", "options"), [("kda", {}), ("gdn2", {}), ("gated_delta", {"forget": "channel"})])
def test_rates_of_channels_are_drawn_from_1_to_16(name: str, options: dict[str, Any]) -> None:
    """As Kimi Delta Attention is published; a decay per head is drawn from 0 to 16."""
    rates = Mixer(name, 64, 64, key_dim=1, value_dim=1, **options).rule.decay.A_log.exp()
    assert 1 <= rates.min() < 4 and 13 < rates.max() <= 16
