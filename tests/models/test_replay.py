"""Steps that are replayed: the numbers of ordinary steps, whatever happens to the cache, the rows or the model in between.

Without a GPU nothing is captured: the step runs on the same memory instead. `benchmarks/throughput.py` compares replayed
graphs with ordinary steps on a GPU before it times them.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from stacks import HYBRIDS, STACKS, label, left_padded, model, tokens
from torch import Tensor

from prism.models import PrismCache, PrismForCausalLM, ReplayedCache
from prism.models.replay import cache_for


@torch.no_grad()
def steps(lm: PrismForCausalLM, cache: PrismCache, ids: Tensor) -> Tensor:
    """Logits after each token, one at a time."""
    return torch.cat([lm(ids[:, i : i + 1], past_key_values=cache).logits for i in range(ids.shape[1])], 1)


def pair(lm: PrismForCausalLM, ids: Tensor) -> tuple[PrismCache, ReplayedCache]:
    """An ordinary cache and a replayed one that have read the same."""
    caches = PrismCache(), ReplayedCache()
    with torch.no_grad():
        for cache in caches:
            lm(ids, past_key_values=cache)
    return caches


def assert_same(plain: PrismCache, replayed: PrismCache) -> None:
    ours, theirs = replayed.tensors(), plain.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_replayed_steps_are_ordinary_steps(layers: Any) -> None:
    lm, ids = model(layers), tokens(2, 40)
    plain, replayed = pair(lm, ids[:, :20])
    assert torch.equal(steps(lm, replayed, ids[:, 20:]), steps(lm, plain, ids[:, 20:]))
    assert_same(plain, replayed)
    assert (replayed._step is not None) == lm.config.constant_state


def test_prompts_padding_and_documents_take_the_ordinary_way_in_between() -> None:
    lm, ids = model("prism*2"), tokens(3, 30)
    plain, replayed = pair(lm, ids[:, :7])
    mask = torch.tensor([[True], [False], [True]])
    with torch.no_grad():
        for cache in (plain, replayed):
            steps(lm, cache, ids[:, 7:10])
            lm(ids[:, 10:11], attention_mask=mask, past_key_values=cache)
            steps(lm, cache, ids[:, 11:14])
            lm(ids[:, 14:19], past_key_values=cache)
            lm(ids[:, 19:20], reset=~mask, past_key_values=cache)
    assert torch.equal(steps(lm, replayed, ids[:, 20:]), steps(lm, plain, ids[:, 20:]))
    assert_same(plain, replayed)


def test_rows_come_and_go() -> None:
    lm, ids = model("prism+gated_delta"), tokens(4, 12)
    plain, replayed = pair(lm, ids[:, :4])
    for cache in (plain, replayed):
        steps(lm, cache, ids[:, 4:6])
        cache.reorder_cache(torch.tensor([2, 2, 0, 1]))
        steps(lm, cache, ids[:, 6:8])
        cache.batch_select_indices(torch.tensor([3, 0]))
        steps(lm, cache, ids[:2, 8:10])
        cache.batch_repeat_interleave(2)
    assert torch.equal(steps(lm, replayed, ids[:, 10:]), steps(lm, plain, ids[:, 10:]))


@pytest.mark.parametrize("duplicate", [ReplayedCache.copy, copy.deepcopy])
def test_a_copy_keeps_its_place(duplicate: Any) -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    _, replayed = pair(lm, ids[:, :5])
    steps(lm, replayed, ids[:, 5:8])
    twin = duplicate(replayed)
    first = steps(lm, replayed, ids[:, 8:14])
    assert torch.equal(steps(lm, twin, ids[:, 8:14]), first)
    assert replayed.get_seq_length() == twin.get_seq_length() == 14


def test_logits_are_the_callers_own() -> None:
    lm, ids = model("prism*2"), tokens(1, 10)
    _, replayed = pair(lm, ids[:, :5])
    with torch.no_grad():
        first = lm(ids[:, 5:6], past_key_values=replayed).logits
        before = first.clone()
        lm(ids[:, 6:7], past_key_values=replayed)
    assert torch.equal(first, before)


def test_weights_may_change_and_move() -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    plain, replayed = pair(lm, ids[:, :5])
    captured = []
    for change in (None, "in place", "elsewhere"):
        if change == "in place":
            lm.lm_head.weight.data.mul_(1.5)
        elif change == "elsewhere":
            lm.model.norm.weight.data = lm.model.norm.weight.data * 0.5
        assert torch.equal(steps(lm, replayed, ids[:, 5:8]), steps(lm, plain, ids[:, 5:8]))
        captured.append(replayed._step)
    assert captured[0] is captured[1] and captured[1] is not captured[2]


def test_gradients_take_the_ordinary_way() -> None:
    lm, ids = model("prism*2"), tokens(1, 8)
    _, replayed = pair(lm, ids[:, :5])
    lm(ids[:, 5:6], past_key_values=replayed).logits.sum().backward()
    assert lm.lm_head.weight.grad is not None
    assert replayed._step is None


def test_from_inference_mode_to_no_grad_and_back() -> None:
    lm, ids = model("prism*2"), tokens(1, 11)
    plain, replayed = pair(lm, ids[:, :5])
    answers = []
    for cache in (plain, replayed):
        logits = []
        for i, mode in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode)):
            with mode():
                logits += [lm(ids[:, j : j + 1], past_key_values=cache).logits for j in (5 + 2 * i, 6 + 2 * i)]
        answers.append(torch.cat(logits, 1))
    assert torch.equal(*answers)


@pytest.mark.parametrize("layers", [*HYBRIDS, "prism*2"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate(layers: str, beams: int) -> None:
    lm = model(layers)
    ids, mask = left_padded([tokens(1, 9)[0], tokens(1, 4, seed=2)[0]])
    settings = {"attention_mask": mask, "num_beams": beams, "do_sample": False, "max_new_tokens": 8}
    texts = [
        lm.generate(ids, past_key_values=cache, pad_token_id=0, eos_token_id=None, **settings)
        for cache in (PrismCache(), ReplayedCache())
    ]
    assert torch.equal(*texts)


@pytest.mark.gpu
@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_graphs_on_a_gpu(layers: Any) -> None:
    lm, ids = model(layers, torch.float32).to("cuda"), tokens(2, 60).to("cuda")
    plain, replayed = pair(lm, ids[:, :20])
    assert torch.equal(steps(lm, replayed, ids[:, 20:]), steps(lm, plain, ids[:, 20:]))
    assert_same(plain, replayed)
    assert (replayed._step is not None) == lm.config.constant_state
    assert isinstance(cache_for(lm), ReplayedCache) == lm.config.constant_state


def test_a_model_on_a_cpu_gets_an_ordinary_cache() -> None:
    assert type(cache_for(model("prism"))) is PrismCache
