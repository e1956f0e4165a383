"""Texts that are written together are those that `prism generate` writes, for every kind of row and any rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from prism.language.generate import Sampling
from prism.models import PrismCache
from prism.serve.lm.rows import FixedRows, Rows, model_step, rows_for
from prism.serve.lm.scheduler import Full
from prism.serve.lm.text import Place, Solo
from tests.serve.lm.models import Ask, busy, generated, model, run, scheduler, tokens_of

SAMPLINGS = [Sampling(0), Sampling(0.8), Sampling(1.0, None, 0.9), Sampling(1.2, 20)]


def asks(count: int, tokens: int = 20) -> list[Ask]:
    prompts = ["Once upon a time", "x", "ab" * 150, "\n"]
    return [Ask(prompts[i % 4] + str(i), SAMPLINGS[i // 4 % 4], seed=i, tokens=tokens) for i in range(count)]


def expected(ask: Ask, layers: str) -> str:
    return generated(model(layers), ask.prompt, ask.tokens, ask.sampling, ask.seed)


@pytest.mark.parametrize("layers", ["prism*2", "rwkv7*2", "prism+sliding_window+softmax"])
def test_texts_together_are_those_of_generate(layers: str) -> None:
    sent = asks(9, tokens=16)
    run(scheduler(model(layers), rows=6), sent, join_after=2)  # some wait for a row, all join at another step
    assert [ask.text() for ask in sent] == [expected(ask, layers) for ask in sent]


def noisy(amount: float) -> Callable[[Tensor, PrismCache], Tensor]:
    """A step whose rounding is much coarser than the machine's, and differs with the number of rows."""
    plain = model_step(model().model)

    def step(tokens: Tensor, cache: PrismCache) -> Tensor:
        logits = plain(tokens, cache)
        noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(len(tokens) + int(tokens[0])))
        return logits + amount * (2 * noise - 1)

    return step


def test_coarse_rounding_does_not_change_exact_texts() -> None:
    sent = asks(6)
    exact = scheduler(model(), noisy(0.02))
    run(exact, sent)
    assert [ask.text() for ask in sent] == [expected(ask, "prism*2") for ask in sent]
    assert exact._read_again._value.get() > 0  # there were ties, and texts joined again after them


def test_without_exact_coarse_rounding_does_change_texts() -> None:
    """So the test above can fail."""
    sent = asks(16)
    run(scheduler(model(), noisy(0.02), exact=False), sent)
    assert [ask.text() for ask in sent] != [expected(ask, "prism*2") for ask in sent]


def test_several_texts_of_one_prompt_have_seeds_of_their_own() -> None:
    ask = Ask("Once", seed=5, n=3)
    run(scheduler(model()), [ask])
    assert [ask.text(i) for i in range(3)] == [generated(model(), "Once", 20, ask.sampling, 5 + i) for i in range(3)]


@pytest.mark.parametrize("layers", ["prism", "softmax", "sliding_window+softmax", "mom", "hstu"])
def test_rows_that_come_and_go_are_those_of_texts_alone(layers: str) -> None:
    lm = model(layers)
    solo, rows = Solo(lm), rows_for(lm.model, 8)
    assert isinstance(rows, FixedRows if lm.model.config.constant_state else Rows)
    places, random = [Place() for _ in range(7)], torch.Generator().manual_seed(0)
    for i, place in enumerate(places):
        solo.read(place, torch.randint(256, (2 + 9 * (i == 2) + i,), generator=random).tolist())
    there: list[Place] = []
    for join, leave in [([0, 1, 2], []), ([3], [2]), ([4, 5, 6, 2], [0]), ([], [4, 5, 6, 3]), ([0], []), ([], [1, 2])]:
        for i in join:
            rows.join(places[i], solo.cache(places[i]))
        rows.leave([places[i] for i in leave])
        there = rows.texts
        given = torch.randint(256, (len(there),), generator=random).tolist()
        logits = rows.step(given)
        for place, token, found in zip(there, given, logits, strict=True):
            torch.testing.assert_close(found, solo.read_next(place, token), rtol=1e-4, atol=1e-4)
    assert len(there) == 1


def test_a_long_prompt_does_not_stop_the_others() -> None:
    one = scheduler(model())
    writing, reading = Ask("a", tokens=30), Ask("b" * 5000, tokens=1)
    one.submit(writing.job(one.lm))
    one.turn()
    one.submit(reading.job(one.lm))
    for _ in range(10):
        before = len(writing.events)
        one.turn()
        assert len(writing.events) <= before + 1
    assert len(writing.events) >= 8 and not reading.events


def test_a_cancelled_job_frees_its_row_and_sends_no_more() -> None:
    one = scheduler(model(), rows=2)
    kept, gone, waiting = Ask("a", tokens=12), Ask("b", tokens=4000), Ask("c", tokens=3)
    jobs = [ask.job(one.lm) for ask in (kept, gone, waiting)]
    for job in jobs:
        one.submit(job)
    for _ in range(6):
        one.turn()
    assert not waiting.events and one.waiting == 1
    sent = len(gone.events)
    one.cancel(jobs[1])
    while busy(one):
        one.turn()
    assert len(gone.events) == sent and kept.text() == expected(kept, "prism*2") and waiting.text()
    assert one.active == one.waiting == len(one.rows) == 0


def test_a_full_queue_refuses() -> None:
    one = scheduler(model(), queue=2)
    for _ in range(2):
        one.submit(Ask("a").job(one.lm))
    with pytest.raises(Full, match="2 requests wait already"):
        one.submit(Ask("a").job(one.lm))


def test_a_failed_computation_ends_its_jobs_and_not_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    one = scheduler(model())
    broken, good = Ask("a"), Ask("b")
    monkeypatch.setattr(one.solo, "read", _fails)
    one.submit(broken.job(one.lm))
    while busy(one):
        one.turn()
    assert isinstance(broken.events[-1], RuntimeError)
    monkeypatch.undo()
    run(one, [good])
    assert good.text() == expected(good, "prism*2")


def _fails(*_: object) -> Tensor:
    raise RuntimeError("no memory")


def test_a_stopped_scheduler_ends_what_is_open() -> None:
    one = scheduler(model())
    ask = Ask("a", tokens=4000)
    one.submit(ask.job(one.lm))
    one.start()
    one.stop()
    assert isinstance(ask.events[-1], Full) and not one.alive


def test_a_stored_text_continues_as_if_it_were_read_again() -> None:
    lm, one = model(), scheduler(model())
    first = Ask("Once" * 60, tokens=60, seed=1)
    job = first.job(lm, store=True)
    one.submit(job)
    while busy(one):
        one.turn()
    tokens = [*tokens_of(lm, first.prompt), *job.writers[0].tokens]
    assert len(job.text) == len(tokens) == job.text.start + len(job.text.tail) and job.text.start >= 256
    solo, place = Solo(lm), Place()
    logits = solo.read(place, tokens)
    again = Place(job.text.cache)
    assert torch.equal(solo.read(again, job.text.tail), logits)
