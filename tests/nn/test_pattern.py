"""Layer patterns as strings and lists."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from prism import rules
from prism.models import PrismConfig, PrismForCausalLM
from prism.nn import Block, LayerSpec, parse_layers
from prism.nn.block import place_options
from prism.nn.pattern import format_layers


@given(
    period=st.lists(st.tuples(st.sampled_from(rules.names()), st.integers(1, 4)), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_period_is_repeated_and_cut(period: list[tuple[str, int]], data: st.DataObject) -> None:
    pattern = " + ".join(f"{name} *{count}" if count > 1 else name for name, count in period)
    expected = [name for name, count in period for _ in range(count)]
    assert [layer.rule for layer in parse_layers(pattern)] == expected
    total = data.draw(st.integers(1, 20))
    assert [layer.rule for layer in parse_layers(pattern, total)] == (expected * total)[:total]
    assert parse_layers(expected, total) == parse_layers(pattern, total)


@given(
    layers=st.lists(
        st.builds(
            LayerSpec,
            st.sampled_from(["prism", "gated_delta", "softmax"]),
            st.dictionaries(
                st.sampled_from(["steps", "keys", "norm_eps"]),
                st.integers(0, 9) | st.booleans() | st.sampled_from(["own", "rotated", 1e-6, 1e20, 0.25]),
                max_size=2,
            ),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_stack_is_written_as_a_pattern_and_read_again(layers: list[LayerSpec]) -> None:
    read = parse_layers(format_layers(layers))
    assert read == layers and [repr(layer) for layer in read] == [repr(layer) for layer in layers]  # 1 is not True


@pytest.mark.parametrize("value", [None, "a, b", "(", "1", [2, (3,)]])
def test_an_option_that_a_pattern_cannot_hold_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=r"option keys is .*, which cannot be written in a pattern of layers"):
        format_layers([LayerSpec("prism", {"keys": value})])


def test_entries_with_options() -> None:
    layers = ["linear", {"rule": "prism", "steps": 3}, ("softmax", {"kv_heads": 1}), ["softmax", {}]]
    assert parse_layers(layers) == [
        LayerSpec("linear", {}),
        LayerSpec("prism", {"steps": 3}),
        LayerSpec("softmax", {"kv_heads": 1}),
        LayerSpec("softmax", {}),
    ]


def test_a_string_with_options() -> None:
    pattern = "prism(steps=1)*2 + prism (keys=previous, gate = false) * 2+kda(lower_bound=-5.0)+linear()"
    first, second = LayerSpec("prism", {"steps": 1}), LayerSpec("prism", {"keys": "previous", "gate": False})
    last = [LayerSpec("kda", {"lower_bound": -5.0}), LayerSpec("linear", {})]
    assert parse_layers(pattern) == [first, first, second, second, *last]
    (layer,) = parse_layers("prism(step_scale=1e+0)")
    assert layer.options == {"step_scale": 1.0}
    model = PrismForCausalLM(PrismConfig(16, 16, 2, "prism(steps=3)+prism*2", rule_options={"prism": {"steps": 1}}))
    assert [block.mixer.write_rank for block in model.model.layers] == [3, 1, 1]


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        ("", "'' is not a rule or rule\\*count"),
        ("prism+", "'' is not a rule or rule\\*count; write for example"),
        ("prism*0", "'prism\\*0' is not a rule"),
        ("prism*-1", "'prism\\*-1' is not a rule"),
        ("prism**2", "'prism\\*\\*2' is not a rule"),
        ("prism*²", "is not a rule"),
        ("prism(steps=2", "'prism.steps=2' is not a rule or rule"),
        ("prism(steps)", "'steps' is not one option=value"),
        ("prism(steps=)", "'steps=' is not one option=value"),
        ("prism(steps=1, steps=2)", "'steps=2' is not one option=value"),
        ("(steps=2)", "is not a rule"),
        ("prism*2(steps=2)", "is not a rule"),
        ("softmaxx", "unknown rule 'softmaxx' .did you mean 'softmax'"),
        ([], "layers must be a pattern such as"),
        (3, "layers must be a pattern such as"),
        ([3], "layers has the entry 3: expected a rule's name"),
        ([{"steps": 2}], "expected a rule's name"),
        ([("prism", 2)], "expected a rule's name"),
    ],
)
def test_bad_layers_are_named(layers: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_layers(layers)


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_bad_counts_are_named(count: Any) -> None:
    with pytest.raises(ValueError, match="num_hidden_layers must be an integer ≥ 1"):
        parse_layers("prism", count)


def test_rules_that_ask_are_told_where_they_stand() -> None:
    assert place_options("rwkv7", 2, 6) == {"layer_index": 2, "layer_count": 6}
    assert place_options("gated_delta", 2, 6) == {}


def test_a_block_adds_what_its_parts_say() -> None:
    block, x = Block("prism", 16, 2, 24), torch.randn(2, 7, 16)
    y, state = block(x)
    mixed, expected = block.mixer(block.mixer_norm(x))
    middle = x + mixed
    assert torch.equal(y, middle + block.mlp(block.mlp_norm(middle)))
    assert state.nbytes == expected.nbytes


def test_switches_are_read_as_python_writes_them_too() -> None:
    """A word would count as set, so that gate=False would keep the gate."""
    (layer,) = parse_layers("prism(gate=False, negative_eigenvalues=True, gain=false)")
    assert layer.options == {"gate": False, "negative_eigenvalues": True, "gain": False}
