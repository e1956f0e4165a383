"""A model computes in the form and on the backend that its configuration, or a `using` block, names."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch

from prism.engine import using
from prism.models import PrismCache, PrismConfig, PrismForCausalLM
from prism.models.loading import config_sha256
from prism.recommend.config import PrismRecConfig
from prism.recommend.model import PrismForRecommendation
from tests.models.recorded import step_of
from tests.models.stacks import model, tokens


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    forms: list[str] = []
    engine = import_module("prism.engine.memory")  # the package's attribute of that name is the function
    original = engine.chosen

    def spy(*arguments: object) -> tuple[str, object]:
        form, implementation = original(*arguments)
        forms.append(form)
        return form, implementation

    monkeypatch.setattr(engine, "chosen", spy)
    return forms


def test_the_configuration_goes_before_the_block(taken: list[str]) -> None:
    ids = tokens(1, 6)
    free, fixed = model("gla*2"), model("gla*2", form="scan", backend="torch")
    with using(form="parallel"):
        free(ids)
        fixed(ids)
    free(ids)
    assert taken == ["parallel"] * 2 + ["scan"] * 2 + ["chunkwise"] * 2


def test_recomputed_layers_take_the_same_form(taken: list[str]) -> None:
    trained = model("gla*2").train()
    trained.gradient_checkpointing_enable()
    with using(form="scan"):
        loss = trained(tokens(1, 6), labels=tokens(1, 6)).loss
    loss.backward()  # computes the layers again, outside the block
    assert taken == ["scan"] * 4


def test_a_recommender_has_the_fields(taken: list[str]) -> None:
    recommender = PrismForRecommendation(PrismRecConfig(9, 8, 1, "gla", form="recurrent", backend="torch"))
    recommender(torch.tensor([[1, 2, 3]]))
    assert taken == ["recurrent"]


@pytest.mark.parametrize("kind", [PrismConfig, PrismRecConfig])
@pytest.mark.parametrize(("field", "value"), [("form", "fast"), ("backend", "cuda")])
def test_a_wrong_name_is_refused(kind: type[PrismConfig], field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {field} '{value}': choose from auto, "):
        kind(**{field: value})


def test_the_fields_are_saved_and_may_be_missing(tmp_path: Path) -> None:
    saved = model("gla", torch.float32, form="parallel")
    saved.save_pretrained(tmp_path)
    assert PrismForCausalLM.from_pretrained(tmp_path).config.form == "parallel"
    path = tmp_path / "config.json"
    contents = json.loads(path.read_text())
    del contents["form"]
    contents.pop("backend", None)
    path.write_text(json.dumps(contents))
    old = PrismForCausalLM.from_pretrained(tmp_path)
    assert (old.config.form, old.config.backend) == ("auto", "auto")
    assert config_sha256(old) == config_sha256(saved), "how a model computes is not what it is"


def test_a_captured_step_is_not_used_for_another_form(taken: list[str], captured_at_once: None) -> None:
    stepped, ids, cache = model("gla"), tokens(1, 20), PrismCache()
    with torch.no_grad():
        for t in range(10):
            stepped(ids[:, t : t + 1], past_key_values=cache)
        assert step_of(cache) is not None
        taken.clear()
        with using(form="scan"):
            stepped(ids[:, 10:11], past_key_values=cache)
        assert taken == ["scan"]
