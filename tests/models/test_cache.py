"""A model that continues from its cache computes the same logits as in one pass."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from prism.models import PrismCache, PrismForCausalLM
from tests.helpers import assert_close
from tests.models.stacks import HYBRIDS, STACKS, label, left_padded, model, tokens

EXACT = 1e-9


@torch.no_grad()
def in_segments(lm: PrismForCausalLM, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of all tokens, computed segment by segment through one cache."""
    cache, logits, start = PrismCache(), [], 0
    for size in sizes:
        seen = None if mask is None else mask[:, : start + size]  # as transformers has it: of all tokens so far
        out = lm(ids[:, start : start + size], attention_mask=seen, past_key_values=cache)
        logits.append(out.logits)
        start += size
    assert cache.get_seq_length() == start == ids.shape[1]
    return torch.cat(logits, 1)


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_cached_logits_are_the_uncached_ones(layers: Any) -> None:
    lm, ids = model(layers), tokens(2, 80)
    whole = lm(ids).logits.detach()
    assert len(whole.argmax(-1).unique()) > 10, "a model that always says the same proves nothing"
    # Stops in the middle of a chunk, steps, a short segment, one over a chunk's end, steps again.
    assert_close("logits", in_segments(lm, ids, [37, 1, 1, 1, 5, 30, 1, 4]), whole, EXACT)


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_left_padded_rows_are_the_rows_alone(layers: Any) -> None:
    lm = model(layers)
    rows = [tokens(1, count, seed)[0] for seed, count in enumerate((26, 9, 17))]
    ids, mask = left_padded(rows)
    logits = in_segments(lm, ids, [20, 1, 4, 1], mask)
    for row, prompt in enumerate(rows):
        assert_close(f"row {row}", logits[row, -len(prompt) :], lm(prompt[None]).logits[0], EXACT)


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_states_after_a_prompt_hold_nothing_else_in_memory(layers: Any) -> None:
    """No state is a view of a tensor with all tokens of the prompt."""
    with torch.no_grad():
        cache = model(layers, torch.float32)(tokens(1, 200), logits_to_keep=1).past_key_values
    for name, z in cache.tensors().items():
        assert z.untyped_storage().nbytes() <= 2 * z.nbytes, name


@torch.no_grad()
def logits_with(lm: PrismForCausalLM, cache: PrismCache, ids: Tensor, prompt: int) -> Tensor:
    """Logits of the tokens after the prompt, one by one."""
    lm(ids[:, :prompt], past_key_values=cache)
    return torch.cat([lm(token, past_key_values=cache).logits for token in ids[:, prompt:].split(1, 1)], 1)


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_memories_in_bfloat16(layers: Any) -> None:
    """The logits stay near those of float32, and the memory keeps its dtype in prompts and steps."""
    lm, ids = model(layers, torch.float32), tokens(2, 30)
    single, half = PrismCache(), PrismCache(torch.bfloat16)
    expected, got = (logits_with(lm, cache, ids, 25) for cache in (single, half))
    assert_close("logits", got, expected, 0.1)
    for one, other in zip(single.states, half.states, strict=True):
        if isinstance(one.memory, Tensor):
            assert (one.memory.dtype, other.memory.dtype) == (torch.float32, torch.bfloat16)
    if layers in (("prism", "prism"), ("gla", "gla")):
        assert not torch.equal(got, expected)


def test_a_caches_dtype_stays_with_it() -> None:
    lm, ids = model("prism+gla", torch.float32), tokens(1, 9)
    cache = PrismCache(torch.bfloat16)
    logits_with(lm, cache, ids, 5)
    twins = [cache.copy(), PrismCache.load(cache.tensors()), pickle.loads(pickle.dumps(cache))]
    expected = logits_with(lm, cache, ids, 5)
    for twin in twins:
        assert twin.state_dtype == torch.bfloat16
        assert torch.equal(logits_with(lm, twin, ids, 5), expected)
    with pytest.raises(ValueError, match=r"state_dtype must be torch\.float32 or torch\.bfloat16"):
        PrismCache(torch.float16)


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_states_do_not_grow_unless_they_say_so(layers: Any) -> None:
    lm = model(layers, torch.float32)
    sizes = []
    with torch.no_grad():
        for count in (100, 3000):
            cache = lm(tokens(1, count), logits_to_keep=1).past_key_values
            lm(tokens(1, 1), past_key_values=cache)
            sizes.append(cache.nbytes)
    assert (sizes[0] == sizes[1]) is lm.config.constant_state
    growing = {"softmax", "hstu"}
    assert lm.config.constant_state is not any(layer.rule in growing for layer in lm.config.layer_plan)


@pytest.mark.parametrize("layers", ["prism*2", "gated_delta+sliding_window"])
def test_ten_thousand_tokens_take_no_more_than_a_hundred(layers: str) -> None:
    lm = model(layers, torch.float32)
    with torch.no_grad():
        cache = lm(tokens(1, 100), logits_to_keep=1).past_key_values
        small = cache.nbytes
        lm(tokens(1, 9_899), past_key_values=cache, logits_to_keep=1)
        lm(tokens(1, 1), past_key_values=cache)
    assert (cache.get_seq_length(), cache.nbytes) == (10_000, small)


def test_a_window_longer_than_the_text_is_softmax() -> None:
    narrow, wide = (model("sliding_window", rule_options={"sliding_window": {"window": w}}) for w in (5, 40))
    full = model("softmax")
    full.load_state_dict(wide.state_dict())
    ids = tokens(2, 40)
    assert_close("wide window", wide(ids).logits, full(ids).logits, EXACT)
    narrow.load_state_dict(wide.state_dict())
    assert (narrow(ids).logits - full(ids).logits)[:, 5:].abs().amin(-1).max() > 1e-3, "a narrow window must see less"


@pytest.mark.parametrize("layers", HYBRIDS)
def test_a_cache_is_saved_and_loaded(layers: str) -> None:
    lm, ids = model(layers), tokens(2, 30)
    cache = lm(ids[:, :20]).past_key_values
    again = PrismCache.load({name: x.clone() for name, x in cache.tensors().items()})
    assert (again.get_seq_length(), again.nbytes, again.batch_size) == (20, cache.nbytes, 2)
    assert_close("logits", lm(ids[:, 20:], past_key_values=again).logits, lm(ids).logits[:, 20:], EXACT)


def test_a_copied_cache_goes_its_own_way() -> None:
    lm, ids = model("prism+softmax"), tokens(1, 12)
    cache = lm(ids[:, :8]).past_key_values
    twin = cache.copy()
    lm(tokens(1, 5, seed=9), past_key_values=twin)
    assert (cache.get_seq_length(), twin.get_seq_length()) == (8, 13)
    assert_close("logits", lm(ids[:, 8:], past_key_values=cache).logits, lm(ids).logits[:, 8:], EXACT)


def test_rows_of_a_cache() -> None:
    lm, ids = model("prism+softmax"), tokens(3, 12)
    whole = lm(ids).logits
    cache = lm(ids[:, :8]).past_key_values
    cache.reorder_cache(torch.tensor([2, 0]))
    assert_close("picked", lm(ids[[2, 0], 8:], past_key_values=cache).logits, whole[[2, 0], 8:], EXACT)
    cache = lm(ids[:, :8]).past_key_values
    cache.batch_repeat_interleave(2)
    twice = ids.repeat_interleave(2, 0)
    assert_close(
        "repeated", lm(twice[:, 8:], past_key_values=cache).logits, whole.repeat_interleave(2, 0)[:, 8:], EXACT
    )


def test_a_cache_of_another_model_is_refused() -> None:
    cache = model("prism*2")(tokens(1, 3)).past_key_values
    with pytest.raises(ValueError, match="past_key_values has 2 layers, the model 3"):
        model("prism*3")(tokens(1, 3), past_key_values=cache)


def test_another_kind_of_cache_is_refused() -> None:
    from transformers import DynamicCache

    with pytest.raises(ValueError, match="past_key_values must be a PrismCache, got DynamicCache"):
        model("prism")(tokens(1, 3), past_key_values=DynamicCache())


def test_layers_hand_out_no_states_that_nobody_keeps() -> None:
    """In training they would be outputs that a wrapper such as FSDP has to look after."""
    lm, seen = model("prism*2"), []
    for layer in lm.model.layers:
        layer.register_forward_hook(lambda _, __, output: seen.append(output[1].tensors()))
    kept = lm(tokens(2, 9)).logits
    assert all(seen)
    seen.clear()
    assert torch.equal(lm(tokens(2, 9), use_cache=False).logits, kept)
    assert seen == [{}, {}]
