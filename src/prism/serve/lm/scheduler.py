"""Serve many requests with one model: read prompts in segments, and write all texts together, one token at a time.

One thread computes. Each of its turns reads one segment of one prompt and then one token of every text, so that a long prompt
delays the others by a segment at a time. Texts join and leave the batch between turns.

Exactness. The numbers of a row depend, in their last bits, on how many rows are computed together. So with `exact` there are
always as many, used or not, and a text is the same at any load. Whether a row's numbers then depend on its place and on the
other rows is tried at the start. Prompts are read alone in any case, always in the same segments (text.py).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prism.language.generate import LanguageModel
from prism.models.decode import Decoder, sizes_for
from prism.serve.lm.settings import LmSettings
from prism.serve.lm.text import PrefixCache, Reading, Text
from prism.serve.lm.writer import Order, Piece, Writer
from prism.serve.metrics import Metrics

log = logging.getLogger("prism.serve")

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

    Attributes:
        exact: whether a text is the same whatever else is computed.
    """

    def __init__(self, lm: LanguageModel, settings: LmSettings, metrics: Metrics) -> None:
        self.lm, self.settings, self.metrics = lm, settings, metrics
        self.prefixes = PrefixCache(settings.prefix_bytes)
        sizes = (settings.rows,) if settings.exact else sizes_for(lm.model, settings.rows)
        if settings.exact and not lm.model.config.constant_state:
            raise ValueError("exact needs a model whose states have a fixed size: omit --exact, or serve another model")
        self.rows = Decoder(lm.model, sizes)
        self.exact = sizes is not None and settings.exact is not False and same_in_any_row(lm, settings.rows)
        if settings.exact and not self.exact:
            raise ValueError(
                f"with --rows {settings.rows} the numbers of a text depend on its row here, so exact cannot be kept: choose "
                "another number of rows, such as 8 or 32, or omit --exact"
            )
        self._waiting: deque[Job] = deque()
        self._reading: deque[Job] = deque()
        self._jobs: dict[Writer, Job] = {}
        self._storing: set[Job] = set()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
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
        """End a job that no one waits for; its rows are free after the current turn."""
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
        """Admit, read one segment, and write one token of every text."""
        self._drop_cancelled()
        self._admit()
        self._read()
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
        """Take writers out of the batch."""
        self.rows.leave(writers)

    # Reading

    def _read(self) -> None:
        """One segment of the next text to read."""
        if not self._reading:
            return
        job = self._reading.popleft()
        try:
            if job.reading is None:
                job.reading = Reading(self.lm, job.text, self.prefixes)
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
        reading, job.reading = job.reading, None
        assert reading is not None and reading.logits is not None
        for writer in job.writers:
            if writer not in self._jobs:  # an earlier text of the job has failed
                return
            writer.end_if_nothing_is_asked()
            if writer.finish is None:
                self._choose(writer, reading.logits.cpu())
            else:
                self._written(writer)
            if writer.finish is None and writer in self._jobs:
                self.rows.join(writer, reading.cache)

    def _finish(self, job: Job) -> None:
        self._forget(job)
        job.send(None)

    # Writing

    def _choose(self, writer: Writer, logits: Tensor) -> None:
        """Write a token, unless its job has ended."""
        if writer not in self._jobs:
            return
        before = len(writer.tokens)
        try:
            writer.choose(logits)
        except Exception as error:  # of this text alone
            log.error("a text could not be written", exc_info=error)
            self._fail(
                self._jobs[writer], RuntimeError("this text could not be written, and the log of the service says why")
            )
            return
        self.metrics.add(len(writer.tokens) - before)
        if writer.finish is not None:
            self._written(writer)

    def _written(self, writer: Writer) -> None:
        """A text has ended: free its row, and when it is the last of its job, end the job."""
        self._remove([writer])
        job = self._jobs[writer]
        if any(each.finish is None for each in job.writers):
            return
        if job.store:  # read the new tokens as part of a text, so that it can be continued
            job.text = job.text.followed_by(job.writers[0].tokens)
            job.reading = Reading(self.lm, job.text, self.prefixes)
            self._reading.append(job)
        else:
            self._finish(job)

    def _write(self) -> None:
        """One token of every text in the batch."""
        writers: list[Writer] = self.rows.texts
        if not writers:
            return
        logits = self.rows.step([writer.last for writer in writers])
        for writer, own in zip(writers, logits, strict=True):
            self._choose(writer, own)


def same_in_any_row(lm: LanguageModel, rows: int, tokens: int = 3) -> bool:
    """Whether a text has the same logits, to the bit, in the first, the middle and the last of so many rows, the others being
    unused or other texts."""
    random = torch.Generator().manual_seed(0)
    given = torch.randint(lm.tokenizer.size, (4, 5 + tokens), generator=random)
    caches = []
    for text in given:
        reader = lm.reader()
        reader.read_all(text[:5])
        caches.append(reader.cache)
    found = []
    for place in sorted({0, rows // 2, rows - 1}):
        decoder = Decoder(lm.model, (rows,))
        for other in range(place):
            decoder.join(f"other {other}", caches[1 + other % 3])
        decoder.join("text", caches[0])
        following = [*(given[1 + other % 3] for other in range(place)), given[0]]
        found.append(torch.stack([decoder.step([int(text[5 + i]) for text in following])[-1] for i in range(tokens)]))
    return all(torch.equal(logits, found[0]) for logits in found)
