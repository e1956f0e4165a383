"""What adapters rely on in peft and transformers. If an upgrade breaks one of these, adapters/compat.py says what to change."""

from __future__ import annotations

import functools
import inspect
from enum import Enum
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import PeftType
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from transformers import cache_utils

import prism
from prism.hf.adapters import PrismAdapterConfig, PrismTuner, compat, delta_net, slots
from tests.hf.adapters.bases import FAMILIES, OWN, adapted, base, close, logits, perturb, tokens

VERSIONS = f"peft {peft.__version__}, transformers {transformers.__version__}"
HUB = [family for family in FAMILIES if family not in OWN]


@pytest.mark.parametrize("family", HUB)
def test_layers_of_transformers_can_be_listened_to(family: str) -> None:
    kinds = {type(m).__name__: m for m in base(family).modules()}
    name = delta_net.CLASSES[family]
    assert name in kinds, (
        f"{family} has no layer of class {name} in {VERSIONS}: change CLASSES in adapters/delta_net.py"
    )
    problem = compat.problem(kinds[name])
    assert problem is None, f"{problem} in {VERSIONS}: change adapters/compat.py"


@pytest.mark.parametrize("method", ["inject_adapter", "_prepare_model", "_create_and_replace", "_replace_module"])
def test_methods_that_the_tuner_overrides_exist(method: str) -> None:
    assert hasattr(BaseTuner, method), f"peft's BaseTuner has no {method} in {VERSIONS}: change adapters/tuner.py"


def test_methods_have_the_arguments_that_peft_passes() -> None:
    for method in ("_prepare_model", "_prepare_adapter_config", "_create_and_replace", "_remove_adapter_name_from_key"):
        theirs, ours = (list(inspect.signature(getattr(cls, method)).parameters) for cls in (BaseTuner, PrismTuner))
        assert theirs == ours, f"BaseTuner.{method} takes {theirs} in {VERSIONS}: change adapters/tuner.py"
    assert hasattr(BaseTunerLayer, "_disable_adapters"), f"models/decode.py looks for it; not in {VERSIONS}"


def test_caches_hold_several_states_per_layer() -> None:
    layer = cache_utils.LinearAttentionLayer()
    fields = ("number_of_states", *slots.TENSORS, *slots.FLAGS)
    missing = [field for field in fields if not hasattr(layer, field)]
    assert not missing, f"cache layers have no {missing} in {VERSIONS}: change adapters/slots.py"
    slots.write(layer, "a", torch.ones(2, 1, 3, 3), torch.ones(2, 2, 4))
    slots.write(layer, "b", torch.ones(2, 1, 3, 3), torch.ones(2, 0, 4))
    slots.keep_only(layer, ["b"])
    assert slots.read(layer, "a") == (None, None)
    memory, window = slots.read(layer, "b")
    assert memory is not None and memory.sum() == 18 and window is None
    assert layer.number_of_states == 2 and layer.has_previous_state == {0: False, 1: True}


def test_the_type_is_a_member_of_pefts_enum() -> None:
    member = compat.add_peft_type("PRISM")
    assert member is PeftType("PRISM") is PeftType["PRISM"] is PeftType.PRISM  # type: ignore[attr-defined]
    assert member in list(PeftType) and list(PeftType).count(member) == 1


def test_another_enum_is_refused_readably(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(Enum):
        LORA = "LORA"

    monkeypatch.setattr(compat, "PeftType", Fixed)
    with pytest.raises(ImportError, match=r"does not support peft .*: its enum PeftType cannot be extended"):
        compat.add_peft_type("PRISM")


def test_another_layer_is_refused_readably(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    plain = base("qwen3_next")
    monkeypatch.delattr(module, "torch_chunk_gated_delta_rule")
    with pytest.raises(ValueError, match=r"adapters do not support transformers .* has no function torch_chunk_gated"):
        peft.get_peft_model(plain, PrismAdapterConfig(rank=4))


def test_functions_that_others_replace_are_listened_to_again() -> None:
    """Another library may put its own memory functions in the module at any time, before or after the adapter."""
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    ids, model = tokens(), perturb(adapted("qwen3_next"))
    before, calls = logits(model, ids), []
    original: Any = inspect.unwrap(module.torch_chunk_gated_delta_rule)

    @functools.wraps(module.torch_chunk_gated_delta_rule)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs.keys())
        return original(*args, **kwargs)

    module.torch_chunk_gated_delta_rule = theirs  # type: ignore[assignment]
    assert torch.equal(logits(model, ids), before)
    assert len(calls) == 2 and all(compat.PASSED_ON not in keys for keys in calls)


@pytest.mark.parametrize("length", [14, 150])
@pytest.mark.parametrize("family", HUB)
def test_accelerated_models_and_adapters_combine_in_either_order(family: str, length: int) -> None:
    """`prism.accelerate(model)` gives layers a `forward` that does not read the names of its module."""
    ids, plain = tokens(1, length), perturb(adapted(family))
    positions = torch.arange(length)[None] % (length // 2)
    alone = torch.cat([logits(plain, part) for part in ids.split(length // 2, 1)], 1)
    whole, cuts = logits(plain, ids), (length - 2, length - 1)
    try:
        before = base(family)
        prism.accelerate(before, quiet=True)
        first = perturb(peft.get_peft_model(before, PrismAdapterConfig(rank=4)).eval())  # type: ignore[arg-type]
        after = perturb(adapted(family))
        prism.accelerate(after, quiet=True)
        for model in (first, after):
            assert close(logits(model, ids), whole, 1e-4)
            assert close(logits(model, ids, cuts), whole, 1e-4)
            assert close(logits(model, ids, position_ids=positions), alone, 1e-4)
    finally:
        prism.restore()
    assert torch.equal(logits(first, ids), whole) and torch.equal(logits(after, ids), whole)


def test_a_layer_that_skips_its_functions_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("qwen3_next")
    layer = next(m for m in model.modules() if isinstance(m, delta_net.AdaptedDeltaNet))
    monkeypatch.setattr(layer.base_layer, "forward", lambda hidden_states, **_: hidden_states)
    with pytest.raises(RuntimeError, match="was not computed by a function of its module"):
        logits(model, tokens())


def test_branches_see_a_query_and_a_key_for_each_head_of_the_values() -> None:
    """Whether the layer repeats those of a group, or the function that it calls."""
    q, v = torch.randn(1, 5, 2, 3), torch.randn(1, 5, 6, 3)
    seen = []

    def memory(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert query is q and key is q
        return value, None

    def branches(o: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        seen.extend(given)
        return o

    compat._listening(memory)(q, q, v, **{compat.PASSED_ON: branches})
    query, key, value = seen
    assert value is v
    for x in (query, key):
        assert torch.equal(x.unflatten(2, (2, 3)), q.unsqueeze(3).expand(1, 5, 2, 3, 3))
