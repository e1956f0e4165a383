"""A layer that can recall before it was trained: the option `start` of the delta rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from prism import rules
from prism.language.model import build_model
from prism.language.settings import ModelSettings
from prism.models import PrismConfig, PrismForCausalLM
from prism.nn import Mixer
from prism.nn.pattern import format_layers, parse_layers
from prism.rules.delta import DeltaFamily
from prism.rules.parts import LowRank
from prism.rules.prism import Prism
from prism.train.model import drawn_start

RULES = [name for name in rules.names() if "start" in rules.get(name).option_names()]


def aligned(rule: Any) -> bool:
    """Whether keys are made like queries, and outputs by the transposed map to values."""
    query, key, value = rule.qkv.weight.split(rule.sizes)
    keys, last = key.chunk(rule.substeps), value.chunk(rule.substeps)[-1]
    return all(torch.equal(query, one) for one in keys) and torch.equal(rule.out.weight, last.mT)


def lags(rule: DeltaFamily) -> list[set[int]]:
    """For queries, keys of each head, and values: how far back the largest tap of their channels reaches."""
    query, key, value = (rule.conv.size - 1 - rule.conv.weight.argmax(0)).split(rule.sizes)
    steps = key.view(rule.substeps, rule.heads, -1).unbind(1)
    return [set(part.flatten().tolist()) for part in (query, *steps, value)]


@given(st.integers(1, 5), st.integers(2, 5), st.sampled_from(RULES))
def test_keys_of_the_slower_heads_look_one_token_back(heads: int, conv_size: int, name: str) -> None:
    rule = Mixer(name, 24, heads, key_dim=4, value_dim=6, conv_size=conv_size, start="recall").rule
    assert isinstance(rule, DeltaFamily) and aligned(rule)
    slow = heads - heads // 2
    assert lags(rule) == [{0}] + [{0}] * (heads // 2) + [{1}] * slow + [{0}]


@pytest.mark.parametrize("options", [{"start": "drawn"}, {"conv_size": 1}, {"qkv_conv": False}])
def test_without_it_or_without_a_convolution_weights_are_drawn(options: dict[str, Any]) -> None:
    rule = Mixer("prism", 24, 2, **options).rule
    assert not aligned(rule) and torch.equal(rule.writes.scale, torch.ones_like(rule.writes.scale))
    assert aligned(Mixer("prism", 24, 2).rule) and not aligned(Mixer("gated_delta", 24, 2).rule)  # the defaults


def answers(name: str, start: str, seed: int, **gate: Any) -> float:
    """How often an untrained layer answers a token with the one that followed it before, rather than with another one.

    Without an output gate, unless `gate` says otherwise."""
    torch.manual_seed(seed)
    tokens, width, right = 12, 96, 0
    embedding = F.normalize(torch.randn(tokens, width), dim=-1) * width**0.5
    options = {"timescales": (1, 1e4), **(gate or {"gate": False})}
    known = {option: value for option, value in options.items() if option in rules.get(name).option_names()}
    layer = Mixer(name, width, 2, key_dim=32, value_dim=96, start=start, **known)
    for asked in range(tokens - 1):
        order = torch.cat([torch.arange(tokens), torch.tensor([asked])])
        with torch.no_grad():
            y = layer(embedding[order].unsqueeze(0))[0][0, -1]
        similar = embedding @ y
        similar[asked] = -torch.inf  # the fast heads answer with the token itself
        right += int(similar.argmax() == asked + 1)
    return right / (tokens - 1)


@pytest.mark.parametrize("name", ["delta", "gated_delta", "prism", "efla"])
def test_an_untrained_layer_answers_with_what_followed_a_token_before(name: str) -> None:
    recall = [answers(name, "recall", seed) for seed in range(6)]
    drawn = [answers(name, "drawn", seed) for seed in range(6)]
    assert sum(recall) / len(recall) > 0.8, recall
    assert sum(drawn) / len(drawn) < 0.3, drawn  # 1 of 11 is a guess


@pytest.mark.parametrize("name", ["gated_delta", "prism"])
def test_a_gate_that_keeps_signs_keeps_what_is_recalled(name: str) -> None:
    """A SiLU starts near 0, with either sign: it scrambles the answer."""
    kept, scrambled = (
        [answers(name, "recall", seed, gate_by=gate) for seed in range(6)] for gate in ("sigmoid", "silu")
    )
    assert sum(kept) / len(kept) > 0.8, kept
    assert sum(scrambled) / len(scrambled) < 0.5, scrambled


def test_the_rules_that_have_it() -> None:
    """Not Comba, whose query is corrected by the key: equal ones would cancel."""
    assert set(RULES) == {"delta", "gated_delta", "prism", "delta_product", "efla", "kda", "gdn2"}


def test_a_model_starts_with_it_at_its_own_scale_and_keeps_loaded_weights(tmp_path: Path) -> None:
    sizes = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2}
    model = PrismForCausalLM(PrismConfig(**sizes, initializer_range=0.1))
    for layer in model.model.layers:
        assert aligned(layer.mixer.rule)
        assert layer.mixer.rule.qkv.weight.std().item() == pytest.approx(0.1, rel=0.1)
    other = PrismForCausalLM(PrismConfig(**sizes, rule_options={"prism": {"start": "drawn"}}))
    assert not any(aligned(layer.mixer.rule) for layer in other.model.layers)
    other.save_pretrained(tmp_path)
    again = PrismForCausalLM.from_pretrained(tmp_path, rule_options={})  # weights of an older model, today's default
    for name, weight in other.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, rtol=0, atol=0)


def test_in_a_mixture_all_memories_can_be_asked_with_the_shared_query() -> None:
    inner = Mixer("mom", 24, 2, inner="prism", memories=3).rule.inner
    keys = inner.sizes[0]
    for memory in inner.qkv.maps:
        assert torch.equal(memory.weight[:keys], inner.qkv.first.weight)
    values = [memory.weight[keys:] for memory in inner.qkv.maps]
    assert torch.equal(inner.out.weight, values[0].mT) and not torch.equal(values[0], values[1])


def test_later_writes_start_smaller_in_slow_heads() -> None:
    assert Mixer("prism", 24, 3, steps=3).rule.writes.scale[1, :, 0].tolist() == pytest.approx([1, 0.1**0.5, 0.1])
    assert Mixer("prism", 24, 3, step_scale=(4, 1)).rule.writes.scale[0, :, 0].tolist() == pytest.approx([4, 2, 1])
    fixed = Mixer("prism", 24, 3, step_scale=[4, 1], scaling="fixed").rule.writes
    assert fixed.scale is None and fixed.gamma()[0, :, 2].tolist() == pytest.approx([4, 2, 1])


def test_a_fixed_scale_is_in_no_file_and_stays_what_it_was() -> None:
    gamma = Mixer("prism", 24, 2, scaling="fixed").rule.writes.gamma()
    assert torch.equal(gamma, torch.ones_like(gamma))


def test_a_layer_of_a_pattern_may_have_another_start() -> None:
    drawn, spread = parse_layers("prism(start=drawn, step_scale=[1, 0.5])+prism(timescales=[2, 16])")
    assert drawn.options == {"start": "drawn", "step_scale": [1, 0.5]} and spread.options == {"timescales": [2, 16]}
    assert parse_layers(format_layers([drawn, spread])) == [drawn, spread]


class Narrow(Prism):
    """PRISM with low-rank maps to queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.qkv = LowRank(width, sum(self.sizes), 4)  # type: ignore[assignment]


def test_a_subclass_with_other_maps_starts_as_it_says() -> None:
    out, _ = Mixer(Narrow, 24, 2)(torch.randn(1, 5, 24))
    assert out.shape == (1, 5, 24)


@pytest.mark.parametrize(
    ("layers", "options", "found"),
    [
        ("prism*2", {}, {"prism": {"start": "drawn"}}),
        ("prism+softmax", {"prism": {"start": "recall"}}, {"prism": {"start": "recall"}}),
        ("prism(preset=paper)", {}, {}),
        ("prism", {"prism": {"preset": "paper"}}, {"prism": {"preset": "paper"}}),
        ("gated_delta", {}, {}),
    ],
)
def test_weights_are_drawn_where_recall_does_not_help(layers: str, options: Any, found: Any) -> None:
    assert drawn_start(options, layers) == found


def test_models_of_bytes_start_with_drawn_weights_and_keep_silu() -> None:
    settings = ModelSettings(hidden_size=32, num_hidden_layers=1, head_dim=16)
    bytes_, words = (build_model(settings, size, 0).model.layers[0].mixer.rule for size in (257, 1024))
    assert not aligned(bytes_) and aligned(words)
    assert (bytes_.gate_by, words.gate_by) == ("silu", "sigmoid")


@pytest.mark.parametrize("wrong", ["much", [1], [1, 2, 3], [0, 1], [1, float("inf")], float("nan")])
def test_other_scales_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="step_scale must be a number, or two numbers above 0, got "):
        Mixer("prism", 24, 2, step_scale=wrong)


def test_another_start_is_refused() -> None:
    with pytest.raises(ValueError, match="start must be one of recall, drawn, got 'warm'"):
        Mixer("prism", 24, 2, start="warm")
