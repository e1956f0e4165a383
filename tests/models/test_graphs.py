"""Replayed steps give exactly the numbers of ordinary steps, with any cache, batch and call in between.

A recorder stands in for CUDA graphs (recorded.py) except in tests marked gpu, so that a missing new capture is noticed on
any machine. Changes of the model between steps are in test_graphs_changes.py. `benchmarks/throughput.py` compares replayed
graphs with ordinary steps.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from prism.engine import cuda_graph
from prism.models import PrismCache, decode
from tests.models.recorded import assert_same, never_captured, pair, step_of, steps
from tests.models.stacks import HYBRIDS, STACKS, label, left_padded, model, tokens

pytestmark = pytest.mark.usefixtures("captured_at_once")


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_replayed_steps_are_ordinary_steps(layers: Any) -> None:
    lm, ids = model(layers), tokens(2, 32)
    plain, replayed = pair(lm, ids[:, :20])
    assert torch.equal(steps(lm, replayed, ids[:, 20:]), steps(lm, plain, ids[:, 20:]))
    assert_same(plain, replayed)
    assert (step_of(replayed) is not None) == lm.config.constant_state


@pytest.mark.parametrize("layers", ["prism+gla", "mom+mamba2"])
def test_replayed_memories_in_bfloat16(layers: str) -> None:
    lm, ids = model(layers, torch.float32), tokens(2, 20)
    plain, replayed = never_captured(PrismCache(torch.bfloat16)), PrismCache(torch.bfloat16)
    with torch.no_grad():
        for cache in (plain, replayed):
            lm(ids[:, :12], past_key_values=cache)
    assert torch.equal(steps(lm, replayed, ids[:, 12:]), steps(lm, plain, ids[:, 12:]))
    assert_same(plain, replayed)
    assert step_of(replayed) is not None


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


@pytest.mark.parametrize("duplicate", [PrismCache.copy, copy.deepcopy])
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


def test_a_layers_state_may_be_exchanged() -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    plain, replayed = pair(lm, ids[:, :5])
    for cache in (plain, replayed):
        steps(lm, cache, ids[:, 5:8])
        cache.states[0] = cache.states[0].map(lambda z: 0.5 * z)
    assert torch.equal(steps(lm, replayed, ids[:, 8:12]), steps(lm, plain, ids[:, 8:12]))


def test_without_room_for_a_second_set_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, ids = model("prism*2"), tokens(1, 12)
    plain, replayed = pair(lm, ids[:, :5])

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(decode.Captured, "__init__", full)
    with pytest.warns(UserWarning, match="cannot be replayed.*no room"):
        answers = steps(lm, replayed, ids[:, 5:12])
    assert torch.equal(answers, steps(lm, plain, ids[:, 5:12]))


def test_a_capture_copies_the_states_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, ids = model("prism*2", torch.float32), tokens(1, 8)
    _, replayed = pair(lm, ids[:, :5])
    copied, count = [], len([z for state in replayed.states for z in state.tensors()])

    def contiguous(z: Tensor) -> Tensor:
        copied.append(z)
        return z.clone(memory_format=torch.contiguous_format)

    monkeypatch.setattr(decode, "_contiguous", contiguous)
    steps(lm, replayed, ids[:, 5:8])
    assert step_of(replayed) is not None and len(copied) == count


def test_an_interrupted_capture_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, ids = model("prism*2"), tokens(1, 12)
    _, replayed = pair(lm, ids[:, :5])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cuda_graph, "capture", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps(lm, replayed, ids[:, 5:6])
    steps(lm, replayed, ids[:, 5:8])
    assert step_of(replayed) is not None


def test_asked_not_to_use_the_cache() -> None:
    lm, ids = model("prism*2"), tokens(1, 8)
    _, replayed = pair(lm, ids[:, :5])
    with torch.no_grad():
        answers = [lm(ids[:, 5:6], past_key_values=replayed, use_cache=False) for _ in range(2)]
    assert torch.equal(answers[0].logits, answers[1].logits)
    assert answers[0].past_key_values is None and replayed.get_seq_length() == 5


def test_answers_are_those_of_an_ordinary_step() -> None:
    lm, ids = model("mom*2"), tokens(2, 8)
    plain, replayed = pair(lm, ids[:, :5])
    with torch.no_grad():
        a, b = (lm(ids[:, 5:6], past_key_values=cache) for cache in (plain, replayed))
        assert step_of(replayed) is not None
        assert torch.equal(a.balance_loss, b.balance_loss)
        for options in ({"return_dict": False}, {"logits_to_keep": torch.tensor([0, 0])}, {"logits_to_keep": 5}):
            a, b = (lm(ids[:, 6:7], past_key_values=cache, **options) for cache in (plain, replayed))
            if options.get("return_dict", True):
                assert torch.equal(a.logits, b.logits)
            else:
                assert len(a) == len(b) and torch.equal(a[0], b[0])


def test_gradients_take_the_ordinary_way() -> None:
    """Also after a replayed step, which has none: what came before it is out of their reach."""
    lm, ids = model("prism*2"), tokens(1, 8)
    found = []
    for cache in (never_captured(PrismCache()), PrismCache()):
        lm.zero_grad()
        lm(ids[:, :5], past_key_values=cache)
        steps(lm, cache, ids[:, 5:6])
        lm(ids[:, 6:7], past_key_values=cache).logits.sum().backward()
        found.append([z.grad.clone() for z in lm.parameters() if z.grad is not None])
    assert step_of(cache) is not None
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


def test_what_was_kept_of_a_cache_stays() -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    _, replayed = pair(lm, ids[:, :5])
    steps(lm, replayed, ids[:, 5:8])
    kept = [copy.copy(replayed), PrismCache.load(replayed.tensors()), pickle.loads(pickle.dumps(replayed))]
    answer = steps(lm, replayed, ids[:, 8:12])
    for cache in kept:
        assert torch.equal(steps(lm, cache, ids[:, 8:12]), answer)


def test_a_dropped_cache_is_gone() -> None:
    """Without the garbage collector's help: states and graphs are large."""
    lm, ids = model("prism*2"), tokens(1, 8)
    _, replayed = pair(lm, ids[:, :5])
    steps(lm, replayed, ids[:, 5:8])
    gone = weakref.ref(step_of(replayed))
    gc.disable()
    try:
        del replayed
        assert gone() is None
    finally:
        gc.enable()


def test_the_first_steps_of_a_kind_are_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PATIENCE", 3)
    lm, ids = model("prism*2"), tokens(2, 20)
    _, replayed = pair(lm, ids[:, :5])
    recorded_after = []
    for i in range(5, 10):
        steps(lm, replayed, ids[:, i : i + 1])
        recorded_after.append(step_of(replayed) is not None)
    assert recorded_after == [False, False, False, True, True]
    replayed.batch_select_indices(torch.tensor([1]))
    steps(lm, replayed, ids[:1, 10:13])
    assert step_of(replayed) is None, "another kind"


def test_a_step_that_cannot_be_recorded_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(*_: Any) -> None:
        tried.append(1)
        try:
            raise RuntimeError("a value was asked for")
        except RuntimeError:
            raise RuntimeError("the capture failed")  # noqa: B904 (as torch does)

    monkeypatch.setattr(cuda_graph, "capture", fails)
    lm, ids = model("prism*2"), tokens(1, 20)
    plain, replayed = pair(lm, ids[:, :5])
    with pytest.warns(UserWarning, match="cannot be replayed.*a value was asked for"):
        answers = steps(lm, replayed, ids[:, 5:12])
    assert torch.equal(answers, steps(lm, plain, ids[:, 5:12]))
    assert len(tried) == 1


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
        for cache in (never_captured(PrismCache()), PrismCache())
    ]
    assert torch.equal(*texts)


@pytest.mark.gpu
@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_graphs_on_a_gpu(layers: Any) -> None:
    lm, ids = model(layers, torch.float32).to("cuda"), tokens(2, 60).to("cuda")
    plain, replayed = pair(lm, ids[:, :20])
    assert torch.equal(steps(lm, replayed, ids[:, 20:]), steps(lm, plain, ids[:, 20:]))
    assert_same(plain, replayed)
    assert (step_of(replayed) is not None) == lm.config.constant_state
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(steps(lm, replayed, ids[:, :20]), steps(lm, plain, ids[:, :20]))
