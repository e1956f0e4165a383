"""Rules from outside the package: registered, they work wherever a rule's name does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prism import Mixer, rules
from prism.cli import main
from prism.engine import Update
from prism.language.settings import ModelSettings
from prism.models import PrismConfig, PrismForCausalLM
from prism.rules import Rule
from prism.rules.delta import GatedDelta
from prism.train.model import rule_options


class Mine(Rule):
    """Linear attention in its shortest form.

    Args:
        size: size of queries, keys and values.
    """

    def __init__(self, width: int, heads: int, *, size: int = 4) -> None:
        super().__init__(width, heads, size, size)
        self.ask = nn.Linear(width, heads * size, bias=False)
        self.key = nn.Linear(width, heads * size, bias=False)
        self.value = nn.Linear(width, heads * size, bias=False)
        self.out = nn.Linear(heads * size, width, bias=False)

    def update(self, x: Tensor, carry: Any, span: Any) -> tuple[Update, dict[str, Tensor], None]:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.ask, self.key, self.value))
        return Update(q, k.unsqueeze(3), v.unsqueeze(3), reset=span.reset, mask=span.mask), {}, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out(o.flatten(-2))


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list of registered rules, and no name on the class, for every test."""
    monkeypatch.setattr(rules, "_REGISTERED", {})
    monkeypatch.setattr(Mine, "name", "Mine")


def refusal(call: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_mixer_takes_a_class_or_a_registered_name() -> None:
    torch.manual_seed(0)
    by_class = Mixer(Mine, 8, 2, size=3)
    rules.register("mine", Mine)
    torch.manual_seed(0)
    by_name = Mixer("mine", 8, 2, size=3)
    x = torch.randn(2, 5, 8)
    assert torch.equal(by_class(x)[0], by_name(x)[0])
    assert "rule='mine'" in repr(by_name) and rules.get("mine") is Mine
    assert rules.names()[0] == "prism" and rules.names()[-1] == "mine"
    assert [option.name for option in rules.describe("mine")] == ["size"]
    assert "'mine' has no option 'sise'" in refusal(lambda: Mixer("mine", 8, 2, sise=3))


def test_options_in_the_name_and_words_for_switches_are_refused() -> None:
    assert "give options as arguments, 'prism', steps=3, gate=False" in refusal(
        lambda: Mixer("prism:steps=3,gate=False", 8, 2)
    )
    for value in ("no", 0, None):
        assert refusal(lambda value=value: Mixer("delta", 8, 2, negative_eigenvalues=value)) == (
            f"negative_eigenvalues must be true or false, got {value!r}"
        )


def test_a_model_with_it_is_saved_and_loaded_once_it_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules.register("mine", Mine)
    config = PrismConfig(vocab_size=16, hidden_size=8, num_heads=2, layers="mine*2+softmax")
    lm = PrismForCausalLM(config)
    lm.save_pretrained(tmp_path)
    tokens = torch.arange(6).unsqueeze(0)
    again = PrismForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens).logits, lm(tokens).logits)
    monkeypatch.setattr(rules, "_REGISTERED", {})
    message = refusal(lambda: PrismForCausalLM.from_pretrained(tmp_path))
    assert "unknown rule 'mine'" in message and "prism.rules.register" in message


def test_registering_again_replaces_the_same_class_only() -> None:
    rules.register("mine", Mine)
    rules.register("mine", Mine)
    newer = type("Mine", (Mine,), {"__module__": Mine.__module__, "__qualname__": Mine.__qualname__})
    rules.register("mine", newer)
    assert rules.get("mine") is newer
    other = type("Other", (Mine,), {})
    assert "already a rule 'mine'" in refusal(lambda: rules.register("mine", other))
    assert "already a rule 'gla'" in refusal(lambda: rules.register("gla", other))
    assert "already has the name 'gated_delta'" in refusal(lambda: rules.register("mine2", GatedDelta))


@pytest.mark.parametrize("name", ["", "a b", "a*2", "a+b", "2a", None, 3])
def test_a_bad_name_is_refused(name: Any) -> None:
    assert repr(name) in refusal(lambda: rules.register(name, Mine))


@pytest.mark.parametrize("wrong", [nn.Linear, int, "Mine", None, Mine(8, 2)])
def test_what_is_not_a_rule_is_refused(wrong: Any) -> None:
    assert "subclass of prism.rules.Rule" in refusal(lambda: rules.register("mine", wrong))


def test_a_rule_without_update_is_refused() -> None:
    empty = type("Empty", (Rule,), {})
    assert refusal(lambda: rules.register("mine", empty)) == "the rule Empty does not define update and output"
    assert "does not define" in refusal(lambda: Mixer(empty, 8, 2))


class Hidden(Mine):
    """An option that the constructor's signature does not show."""

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__(width, heads, size=options.get("key_dim", 4))

    @classmethod
    def option_parameters(cls) -> Any:
        return {"key_dim": super().option_parameters().get("key_dim")}


def test_the_size_of_heads_and_mixtures_ask_option_names() -> None:
    rules.register("hidden", Hidden)
    assert Hidden.option_names() == ("key_dim",)
    settings = ModelSettings(layers="hidden", head_dim=2)
    assert rule_options(settings) == {"hidden": {"key_dim": 2}}


def test_a_mixture_shares_the_maps_that_a_rule_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    """The query map is called `ask`: no list of usual names would find it."""
    rules.register("mine", Mine)
    assert "set shared_maps" in refusal(lambda: Mixer("mom", 8, 2, inner="mine"))
    monkeypatch.setattr(Mine, "shared_maps", ("ask", "out"))
    inner: Any = Mixer("mom", 8, 2, inner="mine", memories=3, shared=False).rule.inner
    assert [name for name, _ in inner.named_parameters()] == [
        "ask.weight",
        *(f"{name}.maps.{memory}.weight" for name in ("key", "value") for memory in range(3)),
        "out.weight",
    ]
    monkeypatch.setattr(Mine, "shared_maps", ("query", "out"))
    assert "name 'query', which it does not have" in refusal(lambda: Mixer("mom", 8, 2, inner="mine"))


def test_a_mixture_of_a_rule_whose_map_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Packed(Mine):
        shared_maps = ("out",)
        query_first_maps = ("packed",)

        def __init__(self, width: int, heads: int) -> None:
            super().__init__(width, heads)
            del self.ask, self.key, self.value
            self.packed = nn.Linear(width, 3 * heads * 4, bias=False)

        def update(self, x: Tensor, carry: Any, span: Any) -> Any:
            q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.packed(x).chunk(3, -1))
            return Update(q, k.unsqueeze(3), v.unsqueeze(3), reset=span.reset, mask=span.mask), {}, None

    rules.register("packed", Packed)
    mixture = Mixer("mom", 8, 2, inner="packed", memories=1, top_k=1, shared=False)
    inner: Any = mixture.rule.inner
    assert inner.packed.first.out_features == 8 and inner.packed.maps[0].out_features == 16
    alone: Any = Mixer("packed", 8, 2)
    whole = torch.cat([inner.packed.first.weight, inner.packed.maps[0].weight])
    alone.rule.load_state_dict({"packed.weight": whole, "out.weight": inner.out.weight})
    x = torch.randn(2, 5, 8)
    assert torch.allclose(mixture(x)[0], alone(x)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (None, "got NoneType"),
        (("update", {}), "got (str, dict)"),
        (("update", None, None), "got (str, NoneType, NoneType)"),
    ],
)
def test_an_update_of_the_wrong_form_is_refused(returned: Any, shown: str) -> None:
    class Wrong(Mine):
        def update(self, x: Tensor, carry: Any, span: Any) -> Any:
            return returned

    message = refusal(lambda: Mixer(Wrong, 8, 2)(torch.zeros(1, 3, 8)))
    assert "rule 'Wrong' must return (update, carry, extra)" in message and message.endswith(shown)


def test_an_output_of_the_wrong_shape_is_refused() -> None:
    class Unprojected(Mine):
        def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
            return o

    message = refusal(lambda: Mixer(Unprojected, 8, 2)(torch.zeros(1, 3, 8)))
    assert "rule 'Unprojected'" in message and message.endswith("[1, 3, 8], got [1, 3, 2, 4]")


def test_a_write_without_its_rank_dimension_is_explained() -> None:
    z = torch.zeros(1, 3, 2, 4)
    assert refusal(lambda: Update(z, z, z.unsqueeze(3))).endswith("for one write per token pass k.unsqueeze(3)")
    assert refusal(lambda: Update(z, z.unsqueeze(3), z)).endswith("for one write per token pass w.unsqueeze(3)")
    assert "unsqueeze" not in refusal(lambda: Update(z, z[0, 0], z))


def test_the_command_line_knows_a_registered_rule(capsys: pytest.CaptureFixture[str]) -> None:
    rules.register("mine", Mine)
    assert main(["rules", "mine"]) == 0
    assert "Linear attention in its shortest form." in capsys.readouterr().out
