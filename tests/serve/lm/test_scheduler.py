"""Texts that are written together are those that `prism generate` writes, and with `exact` the same at any load."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prism.language.generate import Sampling
from prism.models import Decoder
from prism.serve.lm.scheduler import Full
from prism.serve.lm.text import Reading
from tests.serve.lm.models import Ask, busy, generated, model, run, scheduler, tokens_of

SAMPLINGS = [Sampling(0), Sampling(0.8), Sampling(1.0, None, 0.9), Sampling(1.2, 20)]


def asks(count: int, tokens: int = 20) -> list[Ask]:
    prompts = ["Once upon a time", "x", "ab" * 150, "\n"]
    return [Ask(prompts[i % 4] + str(i), SAMPLINGS[i // 4 % 4], seed=i, tokens=tokens) for i in range(count)]


def expected(ask: Ask, layers: str) -> str:
    return generated(model(layers), ask.prompt, ask.tokens, ask.sampling, ask.seed)


@pytest.mark.parametrize("layers", ["prism*2", "rwkv7*2", "prism+sliding_window+softmax"])
def test_texts_together_are_those_of_generate(layers: str) -> None:
    """Up to rounding, which changes none of these."""
    sent = asks(9, tokens=16)
    run(scheduler(model(layers), rows=6), sent, join_after=2)  # some wait for a row, all join at another step
    assert [ask.text() for ask in sent] == [expected(ask, layers) for ask in sent]


@pytest.mark.parametrize("layers", ["prism*2", "gla+mamba2"])
def test_exact_texts_have_the_same_numbers_at_any_load(layers: str) -> None:
    def probabilities(asks: list[Ask], join_after: int) -> list[list[float]]:
        one = scheduler(model(layers), rows=4, exact=True)
        assert one.exact
        run(one, asks, join_after)
        return [[token.logprob for piece in ask.pieces for token in piece.tokens] for ask in asks]

    def sent(**more: int) -> list[Ask]:
        return [Ask("ab" * 9 + str(i), seed=i, tokens=12, logprobs=0, **more) for i in range(6)]

    together = probabilities(sent(), 2)
    assert together == [probabilities([ask], 0)[0] for ask in sent()]


def test_exact_is_refused_where_it_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not scheduler(model()).exact  # on a CPU only if it is asked for
    with pytest.raises(ValueError, match="exact needs a model whose states have a fixed size"):
        scheduler(model("softmax"), exact=True)
    step, calls = Decoder.step, []

    def rounded(self: Decoder, tokens: list[int]) -> Tensor:
        calls.append(tokens)
        return step(self, tokens) + 1e-7 * len(calls)

    monkeypatch.setattr(Decoder, "step", rounded)
    with pytest.raises(ValueError, match="with --rows 4 the numbers of a text depend on its row here"):
        scheduler(model(), rows=4, exact=True)


def test_a_text_that_cannot_be_written_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, good, broken = scheduler(model()), Ask("a"), Ask("b", n=2)
    choose = Sampling.choose

    def fails(self: Sampling, logits: Tensor, random: torch.Generator) -> int:
        if random is random_of_broken and len(broken.events) > 3:
            raise RuntimeError("probabilities are not finite")
        return choose(self, logits, random)

    jobs = [ask.job(one.lm) for ask in (good, broken)]
    for job in jobs:
        one.submit(job)
    one.turn()
    one.turn()
    random_of_broken = jobs[1].writers[1].random
    monkeypatch.setattr(Sampling, "choose", fails)
    while busy(one):
        one.turn()
    assert isinstance(broken.events[-1], RuntimeError) and "this text could not be written" in str(broken.events[-1])
    assert good.text() == expected(good, "prism*2") and len(one.rows) == 0


def test_several_texts_of_one_prompt_have_seeds_of_their_own() -> None:
    ask = Ask("Once", seed=5, n=3)
    run(scheduler(model()), [ask])
    assert [ask.text(i) for i in range(3)] == [generated(model(), "Once", 20, ask.sampling, 5 + i) for i in range(3)]


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
    monkeypatch.setattr(Reading, "read_segment", _fails)
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
    whole, again = lm.reader(), lm.reader()
    logits = whole.read_all(torch.tensor(tokens))
    assert job.text.cache is not None
    again.cache = job.text.cache
    assert torch.equal(again.read_all(torch.tensor(job.text.tail)), logits)
