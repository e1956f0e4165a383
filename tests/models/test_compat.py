"""The private names of transformers that models build on are there, and losing one is either harmless or announced."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

import prism
from prism.engine import compat as torch_compat
from prism.models import PrismCache, PrismForCausalLM, compat
from prism.recommend.config import PrismRecConfig
from tests.models.recorded import step_of
from tests.models.stacks import model, tokens

CLASSES = (PreTrainedModel, GenerationMixin, PreTrainedConfig)
OURS = {PreTrainedModel: PrismForCausalLM, GenerationMixin: PrismForCausalLM, PreTrainedConfig: PrismRecConfig}


@pytest.mark.parametrize("kind", CLASSES)
def test_what_is_overridden_exists(kind: type) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.warn_of_missing(kind)
    for name in compat.OVERRIDDEN[kind.__name__]:
        ours = [name in vars(base) for base in OURS[kind].__mro__ if base.__module__.startswith("prism.")]
        set_later = name == "_keep_in_fp32_modules_strict"  # on each model, which knows its gates
        assert any(ours) or set_later, f"{name} is listed but not overridden"


def test_a_name_that_is_gone_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Renamed:
        pass

    Renamed.__name__ = "GenerationMixin"
    with pytest.warns(
        UserWarning, match=r"no GenerationMixin\._prepare_cache_for_generation, .*install transformers 5"
    ):
        compat.warn_of_missing(Renamed)


def test_another_mark_of_loaded_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mark, loaded weights would be re-initialised."""
    saved = model("prism+softmax", torch.float32)
    saved.save_pretrained(tmp_path)
    loaded = PrismForCausalLM.from_pretrained(tmp_path)
    for name, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    monkeypatch.setattr(compat, "LOADED_MARK", "_gone")
    with pytest.raises(ImportError, match="marks loaded weights in an unknown way"):
        PrismForCausalLM.from_pretrained(tmp_path)


def test_initialisation_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    built = model("gla", torch.float32)
    before = built.lm_head.weight.clone()
    built.init_weights()
    assert torch.equal(built.lm_head.weight, before), "transformers skips what is marked"
    compat.forget_initialised(built)
    built.init_weights()
    assert not torch.equal(built.lm_head.weight, before)


@pytest.mark.parametrize("lost", ["GLOBAL_HOOKS", "FORWARD_HOOKS", "REGISTRIES"])
@torch.no_grad()
def test_a_step_that_cannot_be_watched_is_not_replayed(
    lost: str, monkeypatch: pytest.MonkeyPatch, captured_at_once: None
) -> None:
    built, ids = model("gated_delta"), tokens(2, 12)

    def decode() -> tuple[torch.Tensor, bool]:
        cache = PrismCache()
        built(ids[:, :4], past_key_values=cache)
        logits = [built(ids[:, t : t + 1], past_key_values=cache).logits for t in range(4, 12)]
        return torch.cat(logits, 1), step_of(cache) is not None

    expected, replayed = decode()
    assert replayed
    monkeypatch.setattr(torch_compat, lost, ("_gone",))
    got, replayed = decode()
    assert not replayed
    torch.testing.assert_close(got, expected)


PRIVATE = {
    name
    for kind in (*CLASSES, Cache)
    for name in dir(kind)
    if name.startswith("_") and not name.startswith("__") and not hasattr(nn.Module, name)
}


def private_names(text: str) -> Iterator[str]:
    """Private names of transformers that a file imports, reads, sets or overrides, or names in a string."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        for field in ("attr", "id", "name", "value"):
            name = getattr(node, field, None)
            if isinstance(name, str) and name in {*PRIVATE, compat.LOADED_MARK}:
                yield name


def test_private_names_of_transformers_are_in_one_file() -> None:
    """The mark is read in compat.py alone; the other names are listed there, so that losing one is announced."""
    root = Path(prism.__file__).parent
    listed = {name for names in compat.OVERRIDDEN.values() for name in names}
    unlisted = {
        f"{path.relative_to(root)}: {name}"
        for path in root.rglob("*.py")
        if path != Path(compat.__file__)
        for name in private_names(path.read_text(encoding="utf-8"))
        if name not in listed
    }
    assert unlisted == set()


@pytest.mark.parametrize(
    "line",
    [
        "self._prepare_generation_config(None)",
        "class Model:\n    _supports_sdpa = True",
        "class Model:\n    def _sample(self): ...",
        "getattr(model, '_tp_plan', None)",
        "parameter._is_hf_initialized",
        "from transformers.modeling_utils import _get_tied_weight_keys",
    ],
)
def test_a_private_name_of_transformers_is_seen(line: str) -> None:
    assert list(private_names(line))
