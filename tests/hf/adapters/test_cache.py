"""Branches' states in caches: beams, rows, resets, removed tokens, and switches between adapters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import PeftModel

from prism.hf.adapters import PrismAdapterConfig
from prism.models import PrismCache
from tests.hf.adapters.bases import FAMILIES, adapted, base, close, logits, perturb, tokens

SOME = ("gated_delta", "qwen3_next")


def read(model: Any, ids: torch.Tensor, cache: Any = None) -> Any:
    """The output of a call with a cache."""
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, use_cache=True)


def two_adapters(family: str) -> PeftModel:
    """A base with adapters "a" (active) and "b"."""
    model = adapted(family, "a")
    model.add_adapter("b", PrismAdapterConfig(rank=3, steps=3))
    return perturb(perturb(model, 1, "a"), 2, "b").eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_are_those_without_a_cache(family: str) -> None:
    ids, model = tokens(2, 5), perturb(adapted(family))
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3, "attention_mask": torch.ones_like(ids)}
    with_cache = model.generate(input_ids=ids, **options)
    assert torch.equal(with_cache, model.generate(input_ids=ids, use_cache=False, **options))


def test_a_static_cache_serves_too() -> None:
    ids, model = tokens(2, 5), perturb(adapted("qwen3_next"))
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    static = model.generate(input_ids=ids, cache_implementation="static", **options)
    assert torch.equal(static, model.generate(input_ids=ids, **options))


@pytest.mark.parametrize("family", SOME)
def test_a_copy_is_independent(family: str) -> None:
    ids, model = tokens(), perturb(adapted(family))
    before, twin = logits(model, ids), copy.deepcopy(model)
    perturb(model, 3)
    assert torch.equal(logits(twin, ids), before) and not close(logits(model, ids), before, 1e-2)


@pytest.mark.parametrize("family", SOME)
def test_rows_can_be_reordered_copied_and_reset(family: str) -> None:
    ids, model = tokens(3, 10), perturb(adapted(family))
    whole, order = logits(model, ids), torch.tensor([2, 0, 0])
    cache = read(model, ids[:, :6]).past_key_values
    kept = copy.deepcopy(cache)
    cache.reorder_cache(order)
    assert close(read(model, ids[order, 6:], cache).logits, whole[order, 6:])
    assert close(read(model, ids[:, 6:], kept).logits, whole[:, 6:])
    kept.reset()
    assert close(read(model, ids[:, :6], kept).logits, whole[:, :6])


def test_own_caches_can_be_cropped_saved_and_loaded() -> None:
    ids, model = tokens(2, 12), perturb(adapted("gated_delta"))
    whole, cache = logits(model, ids), PrismCache(rollback=4)
    read(model, ids[:, :9], cache)
    read(model, tokens(2, 2, seed=3), cache)
    cache.crop(-2)
    again = PrismCache.load(cache.tensors())
    assert close(read(model, ids[:, 9:], cache).logits, whole[:, 9:])
    assert close(read(model, ids[:, 9:], again).logits, whole[:, 9:])


@pytest.mark.parametrize("family", SOME)
def test_adapters_switch_without_traces(family: str) -> None:
    ids, model = tokens(), two_adapters(family)
    each = {}
    for name in ("a", "b"):
        model.set_adapter(name)
        each[name] = logits(model, ids), logits(model, ids, (6, 7))
    assert not close(each["a"][0], each["b"][0], 1e-2)
    model.set_adapter("a")
    assert torch.equal(logits(model, ids, (6, 7)), each["a"][1])
    with model.disable_adapter():
        assert torch.equal(logits(model, ids, (6, 8)), logits(base(family), ids, (6, 8)))


@pytest.mark.parametrize("family", SOME)
def test_in_a_cache_an_adapter_starts_with_an_empty_memory(family: str) -> None:
    """It sees nothing of another adapter's writes, nor of its own from before the other was active."""
    ids, model = tokens(2, 12), two_adapters(family)
    model.set_adapter("a")
    caches = [read(model, ids[:, :5]).past_key_values for _ in range(2)]
    with model.disable_adapter():
        for cache in caches:
            read(model, ids[:, 5:6], cache)
    model.set_adapter("b")
    direct = read(model, ids[:, 6:], caches[0]).logits
    with torch.no_grad():  # the same with an adapter "a" of another size and other weights, but the same base states
        perturb(model, 7, "a")
    assert torch.equal(read(model, ids[:, 6:], caches[1]).logits, direct)
    held = _branch_names(caches[0])
    assert held == {"b"}
    with model.disable_adapter():
        read(model, ids[:, :1], caches[0])
    assert _branch_names(caches[0]) == set()
    if isinstance(caches[0], PrismCache):
        windows = {name: z for name, z in caches[0].states[0].carry.items() if "." in name}
        assert windows.keys() == {"a.anchor", "b.anchor"} and not any(bool(z.any()) for z in windows.values())


def _branch_names(cache: Any) -> set[str]:
    """The adapters with a memory in the first layer of a cache."""
    if isinstance(cache, PrismCache):
        memory = cache.states[0].memory
        return (
            {name.removeprefix("adapter.") for name in memory if name != "base"} if isinstance(memory, dict) else set()
        )
    layer = cache.layers[0]
    assert layer.number_of_states == 1 + len(layer.prism_slots) == len(layer.recurrent_states)
    return set(layer.prism_slots)


@pytest.mark.parametrize("family", SOME)
def test_active_adapters_add_up(family: str) -> None:
    ids, model = tokens(), two_adapters(family)
    model.base_model.set_adapter(["a", "b"])
    whole = logits(model, ids)
    assert close(logits(model, ids, (6, 7, 8)), whole)
    for name in ("a", "b"):
        model.base_model.set_adapter(name)
        assert not close(logits(model, ids), whole, 1e-2)
