"""A mixer refuses wrong inputs with one sentence; every rule describes itself."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import prism
from prism import Mixer, State, rules

WIDTH, HEADS = 16, 2


def refusal(call: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def test_wrong_tokens() -> None:
    mixer = Mixer("prism", WIDTH, HEADS)
    for shape in [(2, 5, WIDTH + 1), (5, WIDTH), (2, 0, WIDTH), (2, 5, 1, WIDTH)]:
        message = refusal(lambda shape=shape: mixer(torch.zeros(shape)))
        assert message.startswith("x ") and str(list(shape)) in message and f"[B, T, {WIDTH}]" in message
    for call in (mixer, mixer.decode):
        message = refusal(lambda call=call: call([1]))
        assert "x must be" in message and "got list" in message
    for shape in [(2, 1, WIDTH), (WIDTH,), (2, WIDTH + 1)]:
        message = refusal(lambda shape=shape: mixer.decode(torch.zeros(shape)))
        assert "x " in message and str(WIDTH) in message


@pytest.mark.parametrize("name", ["mask", "reset"])
@pytest.mark.parametrize(
    "flag",
    [
        torch.ones(2, 5),
        torch.ones(2, 5, dtype=torch.long),
        torch.ones(2, 4).bool(),
        torch.ones(5).bool(),
        torch.ones(2, 5, 1).bool(),
    ],
)
def test_wrong_flags(name: str, flag: Tensor) -> None:
    message = refusal(lambda: Mixer("prism", WIDTH, HEADS)(torch.zeros(2, 5, WIDTH), **{name: flag}))
    assert (
        message.startswith(f"{name} ")
        and "bool" in message
        and "[2, 5]" in message
        and str(list(flag.shape)) in message
    )


@pytest.mark.parametrize(("wrong", "meant"), [("prsim", "prism"), ("gated-delta", "gated_delta"), ("Linear", "linear")])
def test_unknown_rule_is_answered_with_the_likely_one(wrong: str, meant: str) -> None:
    for call in (lambda: Mixer(wrong, WIDTH, HEADS), lambda: rules.get(wrong)):
        message = refusal(call)
        assert repr(wrong) in message and f"did you mean {meant!r}" in message
        assert all(name in message for name in rules.names())


@pytest.mark.parametrize("name", rules.names())
def test_unknown_option_is_answered_with_those_there_are(name: str) -> None:
    message = refusal(lambda: Mixer(name, WIDTH, HEADS, stepz=2))
    own = list(inspect.signature(type(Mixer(name, WIDTH, HEADS).rule)).parameters)[2:]
    assert "'stepz'" in message and repr(name) in message and own and all(option in message for option in own)


@pytest.mark.parametrize("name", rules.names())
@pytest.mark.parametrize(
    ("width", "heads", "wrong"), [(0, 2, "width"), (16, 0, "heads"), (16.0, 2, "width"), (16, "2", "heads")]
)
def test_wrong_sizes(name: str, width: Any, heads: Any, wrong: str) -> None:
    assert wrong in refusal(lambda: Mixer(name, width, heads))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("prism", {"steps": 0}),
        ("prism", {"steps": 1.5}),
        ("prism", {"solver": "newton"}),
        ("prism", {"residual": "none"}),
        ("prism", {"preset": "llm"}),
        ("prism", {"key_dim": -1}),
        ("prism", {"up_std": -1}),
        ("prism", {"up_std": math.nan}),
        ("prism", {"up_std": "a"}),
        ("gated_delta", {"conv_size": 0}),
        ("linear", {"feature_map": "cosine"}),
        ("linear", {"normalize": True, "feature_map": "identity"}),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any]) -> None:
    option = list(options)[-1]
    message = refusal(lambda: Mixer(name, WIDTH, HEADS, **options))
    assert option in message and repr(options[option]) in message


def test_a_state_of_another_batch_is_refused() -> None:
    mixer = Mixer("prism", WIDTH, HEADS)
    _, state = mixer(torch.randn(3, 5, WIDTH))
    message = refusal(lambda: mixer(torch.randn(2, 5, WIDTH), state))
    assert message.startswith("state ") and "3 rows" in message and "x has 2" in message


@pytest.mark.parametrize("name", rules.names())
def test_every_rule_describes_itself(name: str) -> None:
    rule = rules.get(name)
    assert rule.name == name
    assert all(isinstance(text, str) and text for text in (rule.forgetting, rule.transition, rule.objective.text))
    assert rule.forms


def test_unknown_form_of_a_mixer() -> None:
    assert "'chunks'" in refusal(lambda: Mixer("prism", WIDTH, HEADS)(torch.zeros(1, 3, WIDTH), form="chunks"))


def test_prism_is_named_first() -> None:
    assert rules.names()[0] == "prism"
    assert prism.rules is rules


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool, torch.bfloat16])
def test_tokens_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    mixer = Mixer("prism", WIDTH, HEADS)
    message = refusal(lambda: mixer(torch.zeros(2, 3, WIDTH, dtype=dtype)))
    assert message.startswith("x ") and str(dtype) in message


@pytest.mark.parametrize("name", rules.names())
def test_a_state_of_another_width_or_rule_is_refused(name: str) -> None:
    mixer = Mixer(name, WIDTH, HEADS)
    x = torch.zeros(2, 3, WIDTH)
    others = [Mixer(name, 2 * WIDTH, HEADS), Mixer("titans" if name != "titans" else "rwkv7", WIDTH, HEADS)]
    for other in others:
        _, state = other(torch.zeros(2, 3, other.rule.width))
        assert "state" in refusal(lambda state=state: mixer(x, state))


@pytest.mark.parametrize("name", rules.names())
def test_a_state_without_a_part_of_it_is_refused(name: str) -> None:
    mixer, x = Mixer(name, WIDTH, HEADS), torch.zeros(2, 3, WIDTH)
    tensors = mixer(x)[1].tensors()
    parts = [{key: z for key, z in tensors.items() if not key.startswith("memory")}]
    parts += [{key: z for key, z in tensors.items() if key != left_out} for left_out in tensors]
    for part in parts:
        if part:
            assert "state" in refusal(lambda part=part: mixer(x, State.load(part)))


@pytest.mark.parametrize("name", rules.names())
def test_a_state_of_any_age_is_accepted(name: str) -> None:
    mixer = Mixer(name, WIDTH, HEADS)
    state = None
    for length in (1, 2, 20, 1):
        _, state = mixer(torch.randn(2, length, WIDTH), state)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"state": torch.zeros(1, 2, 4, 4)}, "state must be a State that this mixer returned, got Tensor"),
        ({"mask": [[True]]}, "mask must be a bool tensor of shape .B, T. = .*, got list"),
    ],
)
def test_wrong_types_of_state_and_mask(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Mixer("prism", 32, 2)(torch.zeros(1, 1, 32), **given)
