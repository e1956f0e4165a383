"""Steps that are replayed: the numbers of ordinary steps, whatever happens to the cache, the rows or the model in between.

Without a GPU a recorder stands in for graphs (recorded.py), so that a step which should have been recorded anew is seen.
`benchmarks/throughput.py` compares replayed graphs with ordinary steps on a GPU.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prism.engine import dispatch as in_place
from prism.models import PrismCache, PrismForCausalLM, ReplayedCache, replay
from prism.models import replay as captured
from prism.models.replay import CapturedStep, cache_for
from tests.models import recorded
from tests.models.stacks import HYBRIDS, STACKS, label, left_padded, model, tokens


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded with the first step of a kind."""
    monkeypatch.setattr(replay, "PATIENCE", 0)
    if not torch.cuda.is_available():
        monkeypatch.setattr(captured, "record", recorded.record)


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


def replaced_weight(lm: PrismForCausalLM) -> None:
    lm.lm_head.weight = nn.Parameter(lm.lm_head.weight.data * 1.5)


def loaded_weights(lm: PrismForCausalLM) -> None:
    lm.load_state_dict({name: z * 1.1 for name, z in lm.state_dict().items()}, assign=True)


def replaced_module(lm: PrismForCausalLM) -> None:
    lm.model.norm = nn.RMSNorm(16, eps=0.3, dtype=torch.float64)


def moved_weight(lm: PrismForCausalLM) -> None:
    lm.model.norm.weight.data = lm.model.norm.weight.data * 0.5


def shortened_weight(lm: PrismForCausalLM) -> None:
    lm.lm_head.weight.data = lm.lm_head.weight.data[:10]


def replaced_forward(lm: PrismForCausalLM) -> None:
    norm = lm.model.norm
    norm.forward = lambda x: 2 * nn.RMSNorm.forward(norm, x)


class Louder(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def another_class(lm: PrismForCausalLM) -> None:
    lm.model.norm.__class__ = Louder


def dropout_in_training(lm: PrismForCausalLM) -> None:
    torch.manual_seed(0)
    lm.model.layers[0].dropout = nn.Dropout(1.0).train()


def weight_in_place(lm: PrismForCausalLM) -> None:
    lm.lm_head.weight.data.mul_(1.5)


CHANGES = [replaced_weight, loaded_weights, replaced_module, moved_weight, shortened_weight, replaced_forward]
CHANGES += [another_class, dropout_in_training, weight_in_place]


@pytest.mark.parametrize("change", CHANGES)
def test_the_model_may_change(change: Callable[[PrismForCausalLM], None]) -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    plain, replayed = pair(lm, ids[:, :5])
    assert torch.equal(steps(lm, replayed, ids[:, 5:8]), before := steps(lm, plain, ids[:, 5:8]))
    step = replayed._step
    change(lm)
    after = steps(lm, plain, ids[:, 5:8])
    assert not torch.equal(after, before)
    assert torch.equal(steps(lm, replayed, ids[:, 5:8]), after)
    assert (replayed._step is step) == (change is weight_in_place), "recorded anew only where it must be"


def test_memories_of_a_recorded_step_are_written_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    _, replayed = pair(lm, ids[:, :5])
    overwritten = []
    memory_ = in_place.memory_
    monkeypatch.setattr(
        in_place, "memory_", lambda u, state, *more: overwritten.append(state) or memory_(u, state, *more)
    )
    steps(lm, replayed, ids[:, 5:8])
    own = [state.memory for state in replayed.states]
    assert [any(z is state for z in overwritten) for state in own] == [True, True]


def test_an_interrupted_step_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no graph, which nothing interrupts."""
    monkeypatch.setattr(captured, "record", CapturedStep.has_fixed_layout)
    lm, ids = model("prism*3"), tokens(1, 20)
    plain, replayed = pair(lm, ids[:, :5])
    assert torch.equal(steps(lm, replayed, ids[:, 5:8]), steps(lm, plain, ids[:, 5:8]))
    assert replayed._step is not None and replayed._step.replay is None
    kind, last = type(lm.model.layers[2]), lm.model.layers[2]
    forward = kind.forward

    def interrupted(self: Any, *arguments: Any, **named: Any) -> Any:
        if self is last:
            raise KeyboardInterrupt
        return forward(self, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps(lm, replayed, ids[:, 8:9])
    assert torch.equal(steps(lm, replayed, ids[:, 8:]), steps(lm, plain, ids[:, 8:]))


def test_a_layer_more_is_told() -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    _, replayed = pair(lm, ids[:, :5])
    steps(lm, replayed, ids[:, 5:8])
    lm.model.layers.append(lm.model.layers[0])
    with pytest.raises(ValueError, match="past_key_values has 2 layers, the model 3"):
        steps(lm, replayed, ids[:, 5:8])


class Adapted(nn.Module):
    """A map with a correction that a flag switches, as peft's layers have it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.more = base, nn.Linear(base.in_features, base.out_features, dtype=torch.float64)
        self._disable_adapters = False

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) if self._disable_adapters else self.base_layer(x) + self.more(x)


def test_adapters_are_switched_between_steps() -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    adapted = lm.model.layers[0].mlp.up = Adapted(lm.model.layers[0].mlp.up)
    plain, replayed = pair(lm, ids[:, :5])
    answers = []
    for disabled in (False, True):
        adapted._disable_adapters = disabled
        answers.append(steps(lm, plain, ids[:, 5:8]))
        assert torch.equal(steps(lm, replayed, ids[:, 5:8]), answers[-1])
    assert not torch.equal(*answers)


def test_hooks_run_at_every_step() -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    _, replayed = pair(lm, ids[:, :5])
    steps(lm, replayed, ids[:, 5:8])
    seen: list[int] = []
    handle = lm.model.norm.register_forward_hook(lambda *_: seen.append(1))
    steps(lm, replayed, ids[:, 8:12])
    assert len(seen) == 4
    handle.remove()
    steps(lm, replayed, ids[:, 12:16])
    assert len(seen) == 4 and replayed._step is not None


def test_hooks_on_all_modules_run_too() -> None:
    lm, ids, seen = model("prism*2"), tokens(1, 20), []
    _, replayed = pair(lm, ids[:, :5])
    steps(lm, replayed, ids[:, 5:8])
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        steps(lm, replayed, ids[:, 8:10])
    finally:
        handle.remove()
    assert len(seen) > 10


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

    monkeypatch.setattr(captured.CapturedStep, "__init__", full)
    with pytest.warns(UserWarning, match="cannot be replayed.*no room"):
        answers = steps(lm, replayed, ids[:, 5:12])
    assert torch.equal(answers, steps(lm, plain, ids[:, 5:12]))


def test_an_interrupted_capture_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, ids = model("prism*2"), tokens(1, 12)
    _, replayed = pair(lm, ids[:, :5])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(captured, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps(lm, replayed, ids[:, 5:6])
    steps(lm, replayed, ids[:, 5:8])
    assert replayed._step is not None


def test_autocast_casts_the_weights_of_today() -> None:
    lm, ids = model("prism*2", torch.float32), tokens(1, 20)
    plain, replayed = pair(lm, ids[:, :5])

    def answers(cache: PrismCache) -> Tensor:
        parts = []
        for i in range(5, 9):
            with torch.autocast("cpu", torch.bfloat16):
                parts.append(steps(lm, cache, ids[:, i : i + 1]))
        return torch.cat(parts, 1)

    before = answers(plain)
    answers(replayed)
    step = replayed._step
    with torch.no_grad():
        lm.lm_head.weight.mul_(-3.0)
    after = answers(plain)
    # Not bit for bit: under the recorder a linear map is another operation of bfloat16.
    assert (answers(replayed) - after).abs().max() < (after - before).abs().max() / 4
    assert replayed._step is step is not None


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
        assert replayed._step is not None
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
    for cache in (PrismCache(), ReplayedCache()):
        lm.zero_grad()
        lm(ids[:, :5], past_key_values=cache)
        steps(lm, cache, ids[:, 5:6])
        lm(ids[:, 6:7], past_key_values=cache).logits.sum().backward()
        found.append([z.grad.clone() for z in lm.parameters() if z.grad is not None])
    assert cache._step is not None
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
    gone = weakref.ref(replayed._step)
    gc.disable()
    try:
        del replayed
        assert gone() is None
    finally:
        gc.enable()


def test_the_first_steps_of_a_kind_are_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "PATIENCE", 3)
    lm, ids = model("prism*2"), tokens(2, 20)
    _, replayed = pair(lm, ids[:, :5])
    recorded_after = []
    for i in range(5, 10):
        steps(lm, replayed, ids[:, i : i + 1])
        recorded_after.append(replayed._step is not None)
    assert recorded_after == [False, False, False, True, True]
    replayed.batch_select_indices(torch.tensor([1]))
    steps(lm, replayed, ids[:1, 10:13])
    assert replayed._step is None, "another kind"


def test_a_step_that_cannot_be_recorded_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(step: captured.CapturedStep) -> bool:
        tried.append(step)
        try:
            raise RuntimeError("a value was asked for")
        except RuntimeError:
            raise RuntimeError("the capture failed")  # noqa: B904 (as torch does)

    monkeypatch.setattr(captured, "record", fails)
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
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(steps(lm, replayed, ids[:, :20]), steps(lm, plain, ids[:, :20]))


def test_a_model_on_a_cpu_gets_an_ordinary_cache() -> None:
    assert type(cache_for(model("prism"))) is PrismCache
