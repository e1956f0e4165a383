"""Removing the last tokens from a cache: it continues as if they had never been read."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from prism.models import PrismCache, PrismForCausalLM
from prism.models.rollback import DEPTH
from tests.helpers import assert_close, examples
from tests.models.recorded import never_captured, step_of, steps
from tests.models.stacks import HYBRIDS, STACKS, label, model, tokens

pytestmark = pytest.mark.usefixtures("captured_at_once")
EXACT = 1e-9
CACHES = (lambda **options: never_captured(PrismCache(**options)), PrismCache)
"""For ordinary steps, and for captured ones."""
SIZES = st.one_of(st.just(1), st.integers(1, 12), st.integers(13, 70))


class Text:
    """A cache, and the inputs that it should have read."""

    def __init__(self, lm: PrismForCausalLM, cache: PrismCache, seed: int = 0, rows: int = 2) -> None:
        self.lm, self.cache = lm, cache
        self.random = torch.Generator().manual_seed(seed)
        self.ids = torch.zeros(rows, 0, dtype=torch.long)
        self.mask, self.reset = self.ids.bool(), self.ids.bool()

    @torch.no_grad()
    def read(self, size: int, kind: str = "plain", keep: int = 0) -> None:
        """Read new tokens, and compare the logits with those of a pass over all inputs."""
        ids = torch.randint(0, self.lm.config.vocab_size, (len(self.ids), size), generator=self.random)
        mask, reset = torch.ones_like(ids).bool(), torch.zeros_like(ids).bool()
        options: dict[str, Any] = {}
        if kind == "padded":
            mask = torch.rand(ids.shape, generator=self.random) < 0.7
            options["attention_mask"] = mask
        elif kind == "documents":
            reset = torch.rand(ids.shape, generator=self.random) < 0.3
            options["reset"] = reset
        given: dict[str, Any] = {"input_ids": ids}
        if kind == "embedded":
            given = {"inputs_embeds": self.lm.get_input_embeddings()(ids)}
        out = self.lm(**given, **options, past_key_values=self.cache, logits_to_keep=keep, use_cache=True)
        self.ids = torch.cat([self.ids, ids], 1)
        self.mask, self.reset = torch.cat([self.mask, mask], 1), torch.cat([self.reset, reset], 1)
        whole = self.lm(self.ids, attention_mask=self.mask, reset=self.reset, use_cache=False).logits
        last = out.logits.shape[1]
        seen = self.mask[:, -last:]
        assert_close("logits", out.logits[seen], whole[:, -last:][seen], EXACT)
        assert self.cache.get_seq_length() == self.ids.shape[1]

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        rest = self.ids.shape[1] - count
        self.ids, self.mask, self.reset = self.ids[:, :rest], self.mask[:, :rest], self.reset[:, :rest]
        assert self.cache.get_seq_length() == rest

    def take(self, rows: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(rows))
        self.ids, self.mask, self.reset = self.ids[rows], self.mask[rows], self.reset[rows]

    @property
    def removable(self) -> int:
        """The number of tokens that can be removed, by the sentence that says so."""
        with pytest.raises(ValueError, match="can be removed") as error:
            self.cache.crop(-self.ids.shape[1] - 1)
        return int(str(error.value).split("the last ")[1].split()[0])


ACTIONS = st.one_of(
    st.tuples(
        st.just("read"), SIZES, st.sampled_from(["plain", "plain", "padded", "documents", "embedded"]), st.booleans()
    ),
    st.tuples(st.just("crop"), st.integers(0, 30)),
    st.tuples(st.just("take"), st.sampled_from([[1, 0], [0, 0], [1, 1]])),
    st.tuples(st.sampled_from(["copy", "save", "pickle"])),
)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("layers", [*HYBRIDS, "prism*2"])
@settings(examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(actions=st.lists(ACTIONS, min_size=4, max_size=12), seed=st.integers(0, 99))
def test_any_reads_and_crops_are_the_tokens_that_remain(kind: Any, layers: str, actions: Any, seed: int) -> None:
    text = Text(model(layers), kind(rollback=DEPTH), seed)
    for name, *arguments in actions:
        if name == "read":
            size, what, last = arguments
            text.read(size, what, keep=1 if last else 0)
        elif name == "crop":
            text.crop(min(arguments[0], text.removable))
        elif name == "take":
            text.take(arguments[0])
        elif name == "copy":
            text.cache = text.cache.copy()
        elif name == "pickle":
            text.cache = pickle.loads(pickle.dumps(text.cache))
        else:
            text.cache = type(text.cache).load(text.cache.tensors())
            text.cache.activate_past_recording()
    text.read(1)
    text.read(1)


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_every_rule_can_be_cropped(layers: Any) -> None:
    text = Text(model(layers), PrismCache(rollback=DEPTH))
    for size, count in ((20, 3), (1, 1), (30, 30), (5, 2), (25, 7)):
        text.read(size)
        text.crop(count)
    text.read(3)


@pytest.mark.parametrize("kind", CACHES)
@given(sizes=st.lists(SIZES, min_size=1, max_size=9), last=st.booleans())
@settings(examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_last_tokens_can_always_be_removed(kind: Any, sizes: list[int], last: bool) -> None:
    """At least as many as promised, also those of the last call, and no more is kept than that needs."""
    text = Text(model("prism" if kind is PrismCache else "prism+softmax"), kind(rollback=DEPTH), rows=1)
    for size in sizes:
        text.read(size, keep=1 if last else 0)
        needed = max(DEPTH, 1 if last else size)
        assert text.removable >= min(needed, text.ids.shape[1])
        kept = text.cache.rollback
        assert kept is not None and len(kept.points) <= 2
        assert sum(map(len, kept.inputs)) == text.removable
        assert not last or text.removable < 4 * DEPTH
    text.crop(min(DEPTH, text.removable))
    text.read(1)


def test_a_growing_cache_is_not_copied() -> None:
    text = Text(model("softmax+prism"), PrismCache(rollback=DEPTH))

    def shared() -> list[bool]:
        assert text.cache.rollback is not None
        now = text.cache.states[0].memory["k"].untyped_storage().data_ptr()
        points = [point for point in text.cache.rollback.points if point.states]
        return [point.states[0].memory["k"].untyped_storage().data_ptr() == now for point in points]

    text.read(40, keep=1)
    for _ in range(20):
        text.read(1)
        assert shared() and all(shared())
    text.read(1, "padded")
    text.read(1, "documents")
    text.read(1)
    assert not any(shared()), "the cache has moved: earlier states keep their own"
    text.crop(4)
    text.read(2)


def test_states_are_copied_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    text, copies = Text(model("prism"), PrismCache(rollback=DEPTH)), []
    keep = PrismCache.kept_states
    monkeypatch.setattr(PrismCache, "kept_states", lambda self: copies.append(1) or keep(self))
    text.read(8)
    steps(text.lm, text.cache, tokens(2, 80))
    assert step_of(text.cache) is not None
    assert len(copies) == 1 + 80 // DEPTH


def test_few_tokens_are_read_again() -> None:
    """Not the prompt, and not ever more after many crops."""
    lm, read = model("prism"), []
    lm.model.norm.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    cache, ids = PrismCache(rollback=DEPTH), tokens(1, 500)
    with torch.no_grad():
        lm(ids, past_key_values=cache, logits_to_keep=4)
        assert sum(read) == 500
        for _ in range(30):
            cache.crop(-3)
            read.clear()
            lm(ids[:, :4], past_key_values=cache, logits_to_keep=4)
            assert sum(read) <= 4 + 3 * DEPTH
    assert cache.get_seq_length() == 530


def test_a_call_without_update_sees_what_is_unread() -> None:
    text = Text(model("prism+softmax"), PrismCache(rollback=DEPTH))
    text.read(40)
    text.crop(5)
    more = tokens(2, 3)
    out = text.lm(more, past_key_values=text.cache, use_cache=False)
    whole = text.lm(torch.cat([text.ids, more], 1)).logits
    assert_close("logits", out.logits, whole[:, -3:], EXACT)
    text.read(2)


def test_hidden_states_are_those_of_the_new_tokens() -> None:
    text = Text(model("prism+softmax"), PrismCache(rollback=DEPTH))
    text.read(40)
    text.crop(30)
    more = tokens(2, 50)
    out = text.lm(more, past_key_values=text.cache, output_hidden_states=True, logits_to_keep=1)
    whole = text.lm(torch.cat([text.ids, more], 1), output_hidden_states=True)
    for ours, theirs in zip(out.hidden_states, whole.hidden_states, strict=True):
        assert_close("hidden", ours, theirs[:, -50:], EXACT)


def test_an_interrupted_call_leaves_the_cache_as_it_was() -> None:
    text = Text(model("prism*2"), PrismCache(rollback=DEPTH))
    text.read(40)
    text.crop(3)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = text.lm.lm_head.register_forward_pre_hook(interrupt)
    inner = text.lm.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        text.lm(tokens(2, 60), past_key_values=text.cache, logits_to_keep=1)
    hook.remove()
    inner.remove()
    text.read(4)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("duplicate", [lambda cache: cache.copy(), copy.deepcopy])
def test_a_copy_is_cropped_alone(kind: Any, duplicate: Any) -> None:
    text = Text(model("prism"), kind(rollback=DEPTH))
    text.read(20)
    for _ in range(5):
        text.read(1)
    twin = Text(text.lm, duplicate(text.cache))
    twin.ids, twin.mask, twin.reset = text.ids, text.mask, text.reset
    twin.crop(7)
    text.read(1)
    twin.read(1)
    text.crop(6)
    text.read(1)


def test_rows_are_repeated_with_what_is_unread() -> None:
    lm, ids = model("prism"), tokens(2, 12)
    cache = PrismCache(rollback=DEPTH)
    lm(ids, past_key_values=cache)
    cache.crop(-4)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    twice = ids.repeat_interleave(2, 0)
    assert_close("logits", lm(twice[:, 8:], past_key_values=cache).logits, lm(twice).logits[:, 8:], EXACT)


def test_lengths_and_counts() -> None:
    """As transformers has it: -n removes n tokens, a length keeps as many, 0 removes none."""
    text = Text(model("prism"), PrismCache(rollback=DEPTH))
    text.read(20)
    for number, left in ((0, 20), (25, 20), (20, 20), (17, 17), (-2, 15)):
        text.cache.crop(number)
        assert text.cache.get_seq_length() == left
    text.cache.crop(-15)
    assert (text.cache.get_seq_length(), text.cache.states, text.cache.unread) == (0, [], [])
    empty = Text(text.lm, text.cache)
    empty.read(20)
    empty.crop(8)
    empty.read(1)


def test_what_cannot_be_removed_is_named() -> None:
    lm, cache = model("prism"), PrismCache()
    lm(tokens(1, 9), past_key_values=cache)
    with pytest.raises(
        ValueError,
        match=r"^of this cache's 9 tokens the last 0 can be removed, or all, not 2: call activate_past_recording",
    ):
        cache.crop(-2)
    cache.activate_past_recording()
    lm(tokens(1, 3), past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"12 tokens the last 3 can be removed, or all, not 10: .*_recording\(10\) before"
    ):
        cache.crop(-10)
    assert cache.get_seq_length() == 12
    cache.crop(-12)
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="must be an integer ≥ 1, got -1"):
        PrismCache(rollback=-1)


def test_a_buffer_that_the_caller_reuses() -> None:
    lm, ids, buffer = model("prism"), tokens(1, 20), torch.zeros(1, 1, dtype=torch.long)
    for cache in (never_captured(PrismCache(rollback=DEPTH)), PrismCache(rollback=DEPTH)):
        with torch.no_grad():
            for t in range(20):
                buffer.copy_(ids[:, t : t + 1])
                lm(buffer, past_key_values=cache)
            cache.crop(-5)
            buffer.zero_()
            assert_close("logits", lm(ids[:, 15:], past_key_values=cache).logits, lm(ids).logits[:, 15:], EXACT)


def test_a_document_may_start_after_a_crop_within_the_first_call() -> None:
    """The states are empty then, but something was read."""
    lm, ids, cache = model("prism"), tokens(1, 9), PrismCache(rollback=DEPTH)
    lm(ids, past_key_values=cache)
    cache.crop(-4)
    reset = torch.tensor([[True, False, False, False]])
    assert_close("logits", lm(ids[:, 5:], past_key_values=cache, reset=reset).logits, lm(ids[:, 5:]).logits, EXACT)


def test_replayed_steps_do_not_overwrite_what_is_kept() -> None:
    text = Text(model("prism*2"), PrismCache(rollback=DEPTH))
    text.read(5)
    for _ in range(11):
        text.read(1)
    text.crop(6)
    text.read(1)


def test_embeddings_are_cropped_too() -> None:
    text = Text(model("prism+softmax"), PrismCache(rollback=DEPTH))
    text.read(60, "embedded", keep=1)
    assert text.removable < 60, "a prompt of embeddings is not kept"
    text.crop(3)
    text.read(2)


@pytest.mark.gpu
@pytest.mark.parametrize("layers", ["prism*2", "gated_delta+sliding_window"])
def test_graphs_on_a_gpu_are_cropped(layers: str) -> None:
    lm, ids = model(layers, torch.float32).to("cuda"), tokens(2, 60).to("cuda")
    cache = PrismCache(rollback=DEPTH)
    with torch.no_grad():
        lm(ids[:, :20], past_key_values=cache, logits_to_keep=1)
        logits = [lm(ids[:, 19:20]).logits[:, :0]]
        while cache.get_seq_length() < 60:
            start = cache.get_seq_length()
            steps(lm, cache, ids[:, :7])
            cache.crop(-7)
            logits.append(steps(lm, cache, ids[:, start : start + 4]))
        whole = lm(ids).logits[:, 20:]
    assert cache._step is not None
    assert_close("logits", torch.cat(logits, 1), whole, 1e-3)
