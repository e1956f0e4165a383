"""The thread that computes: all questions that wait are answered together, with one step of the memory for their users.

Questions are computed in this thread alone. While it computes, others collect; they are the next batch. Nothing waits for a
clock.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from prism.recommend.filters import Excluded
from prism.recommend.top_items import best_items, item_scores
from prism.serve.rec.store import StateRow, StoreError
from prism.serve.rec.users import Present, Users

log = logging.getLogger("prism.serve")
MOST_USERS = 256
"""Most users in one step."""
FLUSH_SECONDS = 1.0
"""How often changed states are stored."""
MOST_STATES = 64
"""Most states that are stored then."""
REASONS = 3
"""Events that are named as the reason for an item."""


@dataclass
class Question:
    """What a request asks. One of `user` and `history` is given."""

    user: str | None = None
    history: tuple[Sequence[str], Sequence[float]] | None = None
    """Items and times in seconds."""
    n: int = 10
    """Number of items to recommend."""
    exclude_seen: bool = True
    exclude: Sequence[int] = ()
    """Rows of the catalogue to leave out."""
    explain: bool = False
    candidates: Sequence[int] | None = None
    """Rows of the catalogue to score, instead of recommending; 0 or less: an item that the model does not know."""
    future: asyncio.Future[Answer] | None = field(repr=False, default=None)
    """Takes the answer."""


@dataclass
class Answer:
    """Items of the catalogue, best first, or the scores of candidates, in their order."""

    rows: list[int]
    scores: list[float]
    reasons: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each item the nearest items of the history: (row, cosine of their vectors)."""


class Engine:
    """Answers questions and keeps states up to date, in one thread."""

    def __init__(self, users: Users, excluded: Callable[[], Sequence[int]] = lambda: ()) -> None:
        self.users, self.excluded = users, excluded
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._questions: list[Question] = []
        self._fresh: dict[str, None] = {}
        self._calls: list[Callable[[], None]] = []
        self._stopping = False
        self._flushed = time.monotonic()
        self._storing = ThreadPoolExecutor(1, "states")
        self._stored: Future[None] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Answer what waits, store the states that are not stored, and stop."""
        self._inbox.put(None)
        self._thread.join()
        self._storing.shutdown()

    async def ask(self, question: Question) -> Answer:
        """The answer to a question; StoreError if the store cannot be read."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        question.future = future
        self._inbox.put(question)
        return await future

    def fresh(self, users: Sequence[str]) -> None:
        """Users who have new events. Their states are updated when nothing else waits."""
        self._inbox.put(list(users))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the engine's thread."""
        self._inbox.put(function)

    def _run(self) -> None:
        while not self._stopping:
            self._receive()
            while self._calls:
                self._guard(self._calls.pop(0))
            if self._questions:
                batch, self._questions = self._questions[:MOST_USERS], self._questions[MOST_USERS:]
                self._answer(batch)
            elif self._fresh:
                users = list(self._fresh)[:MOST_USERS]
                for user in users:
                    del self._fresh[user]
                self._guard(lambda: self.users.bring(users))  # noqa: B023  (called at once)
            most = 0
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._flushed, most = time.monotonic(), MOST_STATES
            self._guard(lambda: self._flush(most))  # noqa: B023
        while self._flush(MOST_STATES):
            pass

    def _flush(self, most: int) -> bool:
        """Have states stored, while this thread continues; returns whether there were any."""
        if not (rows := self.users.flush(most)):
            return False
        if self._stored is not None:
            self._stored.result()  # one batch at a time: if the store is slow, they do not pile up
        self._stored = self._storing.submit(self._put, rows)
        return True

    def _put(self, rows: list[StateRow]) -> None:
        """States are derived from the events: a write that fails costs reading time, nothing else."""
        try:
            self.users.store.put_states(rows, self.users.model)
        except StoreError as error:
            fields = {"reason": str(error), "states": len(rows)}
            log.warning("states not stored, they will be read from the events again", extra={"fields": fields})
        except Exception:
            log.exception("states not stored")

    def _receive(self) -> None:
        """Take everything that waits; if nothing does and there is nothing to do, wait for it."""
        idle = not (self._questions or self._fresh or self._calls)
        try:
            one = self._inbox.get(timeout=FLUSH_SECONDS) if idle else self._inbox.get_nowait()
            while True:
                if one is None:
                    self._stopping = not (self._questions or self._calls)
                    if not self._stopping:
                        self._inbox.put(None)
                        return
                elif isinstance(one, Question):
                    self._questions.append(one)
                elif callable(one):
                    self._calls.append(one)
                else:
                    self._fresh.update(dict.fromkeys(one))
                one = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _guard(self, function: Callable[[], Any]) -> None:
        """Work that no request waits for; a failure is logged, and made up for when the user is needed."""
        try:
            function()
        except Exception as error:
            log.warning("states not updated", extra={"fields": {"reason": str(error)}})

    def _answer(self, batch: list[Question]) -> None:
        results: list[Answer | BaseException]
        try:
            results = list(self._compute(batch))
        except Exception as error:
            results = [error] * len(batch)
        futures = [question.future for question in batch if question.future is not None]
        futures[0].get_loop().call_soon_threadsafe(_resolve, futures, results)

    @torch.no_grad()
    def _compute(self, batch: list[Question]) -> list[Answer]:
        named = [place for place, one in enumerate(batch) if one.user is not None]
        others = [place for place, one in enumerate(batch) if one.user is None]
        answers: dict[int, Answer] = {}
        if named:
            present = self.users.bring([batch[place].user or "" for place in named])
            answers.update(zip(named, self._score([batch[place] for place in named], present), strict=True))
        if others:
            present = self.users.sessions([batch[place].history or ((), ()) for place in others])
            answers.update(zip(others, self._score([batch[place] for place in others], present), strict=True))
        return [answers[place] for place in range(len(batch))]

    def _score(self, questions: Sequence[Question], present: Present) -> list[Answer]:
        """Answers for users as they are now; those who ask for equally many items are scored together."""
        groups: dict[int, list[int]] = defaultdict(list)
        for place, question in enumerate(questions):
            groups[0 if question.candidates is not None else question.n].append(place)
        answers: dict[int, Answer] = {}
        for n, places in groups.items():
            part = Present(present.hidden[places], present.events[places], [present.seen[place] for place in places])
            asked = [questions[place] for place in places]
            found = self._rank(asked, part) if n == 0 else self._recommend(asked, part, n)
            answers.update(zip(places, found, strict=True))
        return [answers[place] for place in range(len(questions))]

    def _recommend(self, questions: Sequence[Question], present: Present, n: int) -> list[Answer]:
        hidden_items = list(self.excluded())
        excluded = [
            np.concatenate([seen if one.exclude_seen else seen[:0], np.array([*one.exclude, *hidden_items], np.int64)])
            for one, seen in zip(questions, present.seen, strict=True)
        ]
        best = best_items(self.users.recommender.model, present.hidden, present.events, Excluded.rows(excluded), n)
        answers = []
        for one, seen, rows, scores in zip(questions, present.seen, *best, strict=True):
            found = rows > 0
            answer = Answer(rows[found].tolist(), scores[found].tolist())
            if one.explain:
                answer.reasons = self._reasons(answer.rows, seen)
            answers.append(answer)
        return answers

    def _reasons(self, rows: Sequence[int], seen: np.ndarray) -> list[list[tuple[int, float]]]:
        """For each item the nearest items of the history, by the cosine of their vectors."""
        if not len(seen) or not rows:
            return [[] for _ in rows]
        vectors = self.users.recommender.model.item_vectors()
        history = F.normalize(vectors[torch.from_numpy(seen.astype(np.int64)).to(vectors.device)].float(), dim=1)
        items = F.normalize(vectors[torch.as_tensor(rows, device=vectors.device)].float(), dim=1)
        best = (items @ history.T).topk(min(REASONS, len(seen)), dim=1)
        return [
            [(int(seen[place]), similarity) for place, similarity in zip(places, similarities, strict=True)]
            for places, similarities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def _rank(self, questions: Sequence[Question], present: Present) -> list[Answer]:
        scores = item_scores(self.users.recommender.model, present.hidden, present.events)
        answers = []
        for question, row in zip(questions, scores, strict=True):
            candidates = torch.as_tensor(question.candidates, dtype=torch.int64, device=row.device).clamp(min=0)
            answers.append(Answer(candidates.tolist(), row[candidates].tolist()))
        return answers


def _resolve(futures: Sequence[asyncio.Future[Answer]], results: Sequence[Answer | BaseException]) -> None:
    for future, result in zip(futures, results, strict=True):
        if future.done():  # the client has gone
            continue
        if isinstance(result, Answer):
            future.set_result(result)
        else:
            future.set_exception(result)
