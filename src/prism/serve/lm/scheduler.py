"""Serve many requests with one model: read prompts in segments, and write all texts together, one token at a time.

One thread computes. Each of its turns reads one segment of one prompt and then one token of every text, so that a long prompt
delays the others by a segment at a time. Texts join and leave the batch between turns.

Exactness. The numbers of a row depend, in their last bits, on how many rows are computed together. With `exact` a text is
nevertheless the one that it would be alone, and that `prism generate` writes:
- prompts are read alone, always in the same segments (text.py);
- a text that is the only one is computed alone;
- in a batch, a token that rounding could have changed is not taken (choice.py). The tokens since the last exact state are
  read again alone, the token is chosen by those logits, and the text joins the batch again from this exact state.
How far rounding reaches is measured at the start, and again whenever a text is read again; eight times that is allowed for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prism.language.generate import LanguageModel
from prism.serve.lm.choice import choose_rows
from prism.serve.lm.rows import FixedRows, Rows, Step, rows_for
from prism.serve.lm.settings import LmSettings
from prism.serve.lm.text import Place, PrefixCache, Reading, Solo, Text
from prism.serve.lm.writer import Order, Piece, Row, Writer
from prism.serve.metrics import Metrics

log = logging.getLogger("prism.serve")
CATCH_UP = 8
"""Tokens of a text that are read again in one turn."""
ALLOWANCE = 8.0
"""How many times the largest difference seen is allowed for."""
LEAST = 2.0**-18
"""Smallest difference allowed for, relative to the spread of the logits."""


Send = Callable[[Piece | Exception | None], None]


class Full(Exception):
    """Too many requests wait."""


class Job:
    """A text to read, and texts to write after it.

    Args:
        text: what to read; its last tokens are not read yet.
        orders: one for each text to write; none only reads.
        send: called in the scheduler's thread with every `Piece`, then once with `None`, or with the error that ended the job.
        store: whether `text` is to be the text after the first writer's last token in the end.
        first: number of the first text to write, if a request has several jobs.
    """

    def __init__(self, text: Text, orders: Sequence[Order], send: Send, store: bool = False, first: int = 0) -> None:
        self.text, self.orders, self.send, self.store, self.first = text, orders, send, store, first
        self.writers: list[Writer] = []
        self.reading: Reading | None = None
        self.cancelled = False
        self.prompt_tokens, self.cached_tokens = len(text), 0

    @property
    def completion_tokens(self) -> int:
        return sum(len(writer.tokens) for writer in self.writers)


class Scheduler:
    """Run jobs in a thread of its own.

    Args:
        step: computes a token per row; by default the model's forward pass.
    """

    def __init__(self, lm: LanguageModel, settings: LmSettings, metrics: Metrics, step: Step | None = None) -> None:
        self.lm, self.settings, self.metrics = lm, settings, metrics
        self.solo = Solo(lm)
        self.prefixes = PrefixCache(settings.prefix_bytes)
        self.rows = rows_for(lm.model, settings.rows, step)
        weights = next(lm.model.parameters()).dtype
        self.exact = weights == torch.float32 if settings.exact is None else settings.exact
        self.tolerance = 0.0
        """How far the logits of a row may be from those of the text alone, relative to their spread."""
        if self.exact:
            self._allow_for(rounding(self.solo, rows_for(lm.model, 4, step)))
        self._waiting: deque[Job] = deque()
        self._reading: deque[Job] = deque()
        self._behind: deque[Writer] = deque()
        self._alone: Writer | None = None
        self._jobs: dict[Writer, Job] = {}
        self._storing: set[Job] = set()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._read_again = metrics.counter("texts_read_again", "Texts read again because two tokens were nearly tied.")
        metrics.gauge("texts_active", "Texts being read or written.", lambda: self.active)
        metrics.gauge("requests_waiting", "Requests that wait for a free row.", lambda: self.waiting)
        metrics.gauge("prefix_bytes", "Bytes kept of texts that were read.", lambda: self.prefixes.nbytes)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Number of texts that are read or written."""
        return len(self._jobs) + sum(not job.writers for job in list(self._reading))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="prism-scheduler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its turn; jobs that are not done get an error."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Queue a job; raises `Full` if too many wait."""
        with self._changed:
            if len(self._waiting) >= self.settings.queue:
                raise Full(f"{self.settings.queue} requests wait already: try again later")
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """End a job that nobody waits for; its rows are free after the current turn."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._waiting or self._reading or self._jobs):
                    self._changed.wait()
                if self._stopping:
                    break
            try:
                self.turn()
            except Exception as error:  # a turn reports the errors of a job itself: this is one of the scheduler
                log.error("the scheduler failed", exc_info=error)
                self._end_all(RuntimeError("the computation failed, and the log of the service says why"))
        self._end_all(Full("the service is stopping"))

    def turn(self) -> None:
        """Admit, read one segment, read again a few tokens, and write one token of every text."""
        self._drop_cancelled()
        self._admit()
        self._read()
        self._catch_up()
        self._write()

    # Jobs

    def _admit(self) -> None:
        with self._changed:
            while self._waiting:
                job = self._waiting[0]
                if job.cancelled:
                    self._waiting.popleft()
                    continue
                if len(self._jobs) + len(job.orders) > self.settings.rows:
                    return
                self._waiting.popleft()
                job.writers = [Writer(self.lm, order, i, job.send) for i, order in enumerate(job.orders, job.first)]
                self._jobs |= dict.fromkeys(job.writers, job)
                self._reading.append(job)

    def _drop_cancelled(self) -> None:
        gone = {job for job in (*self._reading, *self._jobs.values()) if job.cancelled}
        for job in gone:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        """Remove everything of a job."""
        if job in self._reading:
            self._reading.remove(job)
        self._remove(job.writers)
        for writer in job.writers:
            self._jobs.pop(writer, None)

    def _fail(self, job: Job, error: Exception) -> None:
        self._forget(job)
        job.send(error)

    def _end_all(self, error: Exception) -> None:
        with self._changed:
            jobs = {*self._waiting, *self._reading, *self._jobs.values()}
            self._waiting.clear()
        for job in jobs:
            self._fail(job, error)

    def _remove(self, writers: Sequence[Writer]) -> None:
        """Take writers out of the batch, wherever they are."""
        self.rows.leave(writers)
        self._behind = deque(writer for writer in self._behind if writer not in writers)
        if self._alone in writers:
            self._alone = None

    # Reading

    def _read(self) -> None:
        """One segment of the next text to read."""
        if not self._reading:
            return
        job = self._reading.popleft()
        try:
            if job.reading is None:
                job.reading = Reading(self.solo, job.text, self.prefixes)
                job.cached_tokens = job.reading.reused
            if not job.reading.settled or (job.writers and not job.reading.done):
                job.reading.read_segment()
        except Exception as error:  # of this text alone
            log.error("a text could not be read", exc_info=error)
            self._fail(job, RuntimeError("this text could not be read, and the log of the service says why"))
            return
        job.text = job.reading.text
        if not job.reading.settled:
            self._reading.append(job)
        elif not any(writer.finish is None for writer in job.writers):
            self._finish(job)
        elif job.reading.done:
            self._begin(job)
        else:
            self._reading.append(job)

    def _begin(self, job: Job) -> None:
        """Write the first token of every text of a job that was read."""
        reading = job.reading
        assert reading is not None and reading.logits is not None
        cache = self.solo.cache(reading.place)
        for writer in job.writers:
            writer.row = Row(Place(cache, job.text.documents))
            writer.end_if_nothing_is_asked()
            if writer.finish is None:
                self._choose(writer, reading.logits)
            self._continue(writer)

    def _finish(self, job: Job) -> None:
        self._forget(job)
        job.send(None)

    # Writing

    def _choose(self, writer: Writer, logits: Tensor) -> None:
        """Write a token by exact logits."""
        before = len(writer.tokens)
        writer.choose(logits.cpu())
        self.metrics.add(len(writer.tokens) - before)

    def _continue(self, writer: Writer) -> None:
        """What follows a token that was chosen alone: the end, or a place in the batch."""
        if writer.finish is not None:
            self._written(writer)
        elif self.exact and self._alone is None and not len(self.rows):
            self._alone = writer
        else:
            if self._alone is not None:
                self._join(self._alone)
                self._alone = None
            self._join(writer)

    def _join(self, writer: Writer) -> None:
        assert writer.row.place is not None
        cache = self.solo.cache(writer.row.place)
        writer.row = Row(anchor=cache if self.exact else None)
        self.rows.join(writer, cache)

    def _written(self, writer: Writer) -> None:
        """A text has ended: free its row, and when it is the last of its job, end the job."""
        self._remove([writer])
        job = self._jobs[writer]
        writer.row = Row()
        if any(each.finish is None for each in job.writers):
            return
        if job.store:  # read the new tokens as part of a text, so that it can be continued
            job.text = job.text.followed_by(job.writers[0].tokens)
            job.reading = Reading(self.solo, job.text, self.prefixes)
            self._reading.append(job)
        else:
            self._finish(job)

    def _write(self) -> None:
        """One token of every text in the batch, or of the one text that is alone."""
        if self._alone is not None:
            writer = self._alone
            assert writer.row.place is not None
            self._choose(writer, self.solo.read_next(writer.row.place, writer.last))
            if writer.finish is not None:
                self._written(writer)
            return
        writers: list[Writer] = list(self.rows.texts)
        if not writers:
            return
        logits = self.rows.step([writer.last for writer in writers])[:, : self.lm.tokenizer.size]
        tolerance = self.tolerance * logits.std(-1) if self.exact else None
        samplings = [writer.order.sampling for writer in writers]
        tokens = choose_rows(logits, samplings, [writer.random for writer in writers], tolerance)
        for writer, token, own in zip(writers, tokens, logits, strict=True):
            if self.exact:
                writer.row.since.append(writer.last)
            if token is None:
                self._leave_to_catch_up(writer, own)
                continue
            before = len(writer.tokens)
            writer.write(token, own)
            self.metrics.add(len(writer.tokens) - before)
            if writer.finish is not None:
                self._written(writer)

    # Reading again

    def _leave_to_catch_up(self, writer: Writer, logits: Tensor) -> None:
        self.rows.leave([writer])
        row, job = writer.row, self._jobs[writer]
        writer.row = Row(Place(row.anchor, job.text.documents), since=row.since, logits=logits)
        self._behind.append(writer)
        self._read_again.inc()

    def _catch_up(self) -> None:
        """Read a few tokens of a text alone; at its end, choose the token that was not certain."""
        if not self._behind:
            return
        writer = self._behind[0]
        row = writer.row
        assert row.place is not None and row.logits is not None
        now, row.since = row.since[:CATCH_UP], row.since[CATCH_UP:]
        for token in now:
            logits = self.solo.read_next(row.place, token)
        if row.since:
            self._behind.rotate(-1)
            return
        self._behind.popleft()
        exact = logits[: self.lm.tokenizer.size].float().cpu()
        self._allow_for(difference(row.logits, exact))
        writer.row = Row(row.place)
        self._choose(writer, exact)
        self._continue(writer)

    def _allow_for(self, seen: float) -> None:
        self.tolerance = max(self.tolerance, ALLOWANCE * seen, LEAST)


def difference(logits: Tensor, exact: Tensor) -> float:
    """The largest difference of logits, relative to their spread."""
    return float((logits - exact).abs().max() / exact.std())


def rounding(solo: Solo, rows: Rows | FixedRows, texts: int = 3, tokens: int = 8) -> float:
    """How far the logits of a row are from those of the same text alone, measured on a few random texts."""
    random = torch.Generator().manual_seed(0)
    size = solo.lm.tokenizer.size
    places = [Place(documents=False) for _ in range(texts)]
    for i, place in enumerate(places):
        solo.read(place, torch.randint(size, (3 + i,), generator=random).tolist())
        rows.join(place, solo.cache(place))
    largest = 0.0
    for _ in range(tokens):
        given = torch.randint(size, (texts,), generator=random).tolist()
        together = rows.step(given)[0, :size]
        largest = max(largest, difference(together, solo.read_next(places[0], given[0])[:size].float().cpu()))
    return largest
