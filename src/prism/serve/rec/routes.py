"""Routes of the recommender's API. Those of feedback and recommendations are Gorse's, so that its clients work."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Path, Query
from fastapi.responses import JSONResponse

from prism.serve.errors import ApiError
from prism.serve.rec.engine import Answer, Question
from prism.serve.rec.schemas import (
    PATH_SAFE,
    Detail,
    Feedback,
    FoundItem,
    FoundUser,
    HistoryEvent,
    ItemDescription,
    ItemsStored,
    RankRequest,
    RankResponse,
    RowAffected,
    Score,
    SessionFeedback,
    Stats,
    UserResponse,
    iso,
    microseconds,
)
from prism.serve.rec.service import RecService
from prism.serve.rec.settings import LONGEST_ID, MOST_EVENTS, MOST_N
from prism.serve.rec.store import Event, KeyReused, Submission

UserPath = Annotated[str, Path(min_length=1, max_length=LONGEST_ID, pattern=PATH_SAFE)]
Count = Annotated[int, Query(ge=1, le=MOST_N, description="Number of items.")]
Offset = Annotated[int, Query(ge=0, le=MOST_N, description="Items to leave out at the top.")]
Prefix = Annotated[str, Query(max_length=LONGEST_ID, pattern=r"^[^\x00-\x1f\x7f]*$")]
Feedbacks = Annotated[list[Feedback], Body(max_length=MOST_EVENTS)]
Session = Annotated[list[SessionFeedback], Body(max_length=MOST_EVENTS)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        max_length=LONGEST_ID,
        pattern=r"^[\x21-\x7e]+$",
        description="A second request with the same key and events stores nothing: for events without a time.",
    ),
]
ApiVersion = Annotated[str | None, Header(description='"2": items with scores, as newer clients of Gorse expect.')]
ExcludeSeen = Annotated[bool, Query(alias="exclude-seen", description="Leave out items of the history.")]
WithReasons = Annotated[bool, Query(description="With scores, and the nearest items of the history.")]


def feedback_routes(service: RecService) -> APIRouter:
    """Events in."""
    router = APIRouter(tags=["events"])

    async def store(events: Sequence[Feedback], key: str | None, overwrite: bool) -> RowAffected:
        rows = sorted_events(events)
        digest = "" if key is None else hashlib.sha256(repr(rows).encode()).hexdigest()
        if not rows:
            return RowAffected(RowAffected=0)
        try:
            count = await service.append(Submission(rows, key, digest, overwrite))
        except KeyReused as error:
            raise ApiError(
                409, "this Idempotency-Key was used with other events: make a new key", "Idempotency-Key", "key_reused"
            ) from error
        return RowAffected(RowAffected=count)

    @router.post("/api/feedback")
    async def insert_feedback(events: Feedbacks, idempotency_key: IdempotencyKey = None) -> RowAffected:
        """Store events. When this answers, they are durable; one that is already there is not stored again.

        Events of one request are read in the order of their times, requests in the order in which they come.
        """
        return await store(events, idempotency_key, overwrite=False)

    @router.put("/api/feedback")
    async def replace_feedback(events: Feedbacks, idempotency_key: IdempotencyKey = None) -> RowAffected:
        """Store events, and replace the value of those that are already there."""
        return await store(events, idempotency_key, overwrite=True)

    return router


def recommend_routes(service: RecService) -> APIRouter:
    """Recommendations out."""
    router = APIRouter(tags=["recommendations"])

    def names(rows: Sequence[int]) -> list[Any]:
        return service.recommender.catalogue.names(rows)

    def items(answer: Answer, offset: int) -> tuple[list[str], list[float]]:
        return [str(name) for name in names(answer.rows[offset:])], answer.scores[offset:]

    @router.get("/api/recommend/{user}", response_model=list[str] | list[Detail] | list[Score])
    @router.get("/api/recommend/{user}/", include_in_schema=False)  # what clients ask for without a category
    async def recommend(
        user: UserPath,
        n: Count = 10,
        offset: Offset = 0,
        exclude_seen: ExcludeSeen = True,
        detail: WithReasons = False,
        x_api_version: ApiVersion = None,
    ) -> JSONResponse:
        """The best next items of a user: ids, best first. A user without events gets the most popular items."""
        asked = Question(user, n=n + offset, exclude_seen=exclude_seen, explain=detail)
        answer = await service.engine.ask(asked)
        ids, scores = items(answer, offset)
        if detail:
            return JSONResponse(_details(ids, scores, answer.reasons[offset:], names))
        if x_api_version == "2":
            return JSONResponse([{"Id": item, "Score": score} for item, score in zip(ids, scores, strict=True)])
        return JSONResponse(ids)

    @router.post("/api/session/recommend", response_model=list[Score])
    async def session_recommend(
        events: Session,
        n: Count = 10,
        offset: Offset = 0,
        exclude_seen: ExcludeSeen = True,
        detail: WithReasons = False,
    ) -> JSONResponse:
        """The best next items after an anonymous history. Nothing of it is stored."""
        asked = Question(history=_history(events), n=n + offset, exclude_seen=exclude_seen, explain=detail)
        answer = await service.engine.ask(asked)
        ids, scores = items(answer, offset)
        found: list[dict[str, Any]] = [{"Id": item, "Score": score} for item, score in zip(ids, scores, strict=True)]
        if detail:
            for one, more in zip(found, _details(ids, scores, answer.reasons[offset:], names), strict=True):
                one["Because"] = more["Because"]
        return JSONResponse(found)

    @router.post("/rank", response_model=RankResponse)
    async def rank(request: RankRequest) -> JSONResponse:
        """Scores of given items for a user, or after a history."""
        started = time.perf_counter()
        if request.user is not None and request.history is not None:
            raise ApiError(422, "give user or history, not both", "history")
        ids = [one if isinstance(one, str) else one.id for one in request.items]
        rows = service.recommender.catalogue.rows(ids).tolist()
        history = (
            None if request.user is not None else (request.history or [], [time.time()] * len(request.history or []))
        )
        answer = await service.engine.ask(Question(request.user, history, candidates=rows))
        ranked = [
            {"item": item, "score": score if row > 0 else None, "known": row > 0}
            for item, row, score in zip(ids, rows, answer.scores, strict=True)
        ]
        ranked.sort(key=lambda one: math.inf if one["score"] is None else -one["score"])
        return JSONResponse({"items": ranked, "took": round(1000 * (time.perf_counter() - started), 3)})

    return router


def data_routes(service: RecService) -> APIRouter:
    """Users, items and figures."""
    router = APIRouter(tags=["users and items"])

    @router.get("/api/user/{user}")
    def get_user(
        user: UserPath, n: Annotated[int, Query(ge=0, le=MOST_N, description="Events.")] = 100
    ) -> UserResponse:
        """A user's newest events and state."""
        found = service.user(user)
        if found is None:
            raise ApiError(404, f"there are no events of the user {user!r}", "user", "unknown_user")
        uid, facts = found
        log = service.store.last_events(uid, n)
        known = service.recommender.catalogue.rows([event.item for event in log]) > 0
        return UserResponse(
            UserId=user,
            EventCount=facts.events,
            StateAge=None if facts.updated is None else max(0.0, round(time.time() - facts.updated, 3)),
            StateEvents=facts.state_events,
            StateBytes=facts.state_bytes,
            Feedback=[
                HistoryEvent(
                    FeedbackType=event.kind,
                    ItemId=event.item,
                    Timestamp=iso(event.time),
                    Value=event.value,
                    Known=bool(is_known),
                )
                for event, is_known in zip(log, known, strict=True)
            ],
        )

    @router.delete("/api/user/{user}")
    def delete_user(user: UserPath) -> RowAffected:
        """Delete a user: all events and the state."""
        return RowAffected(RowAffected=service.delete(user))

    @router.get("/api/users")
    def find_users(prefix: Prefix = "", n: Count = 20) -> list[FoundUser]:
        """Users whose id starts with `prefix`, in order."""
        return [FoundUser(UserId=name, EventCount=events) for name, events in service.store.find_users(prefix, n)]

    @router.get("/api/items")
    def find_items(prefix: Prefix = "", n: Count = 20) -> list[FoundItem]:
        """Items of the model whose id starts with `prefix`, in order; without a prefix, the most popular ones."""
        return [FoundItem(ItemId=name, Count=count) for name, count in service.find_items(prefix, n)]

    @router.post("/api/item")
    def insert_item(item: ItemDescription) -> ItemsStored:
        """Describe an item. A model with features recommends it at once, also if it was not trained on it."""
        return service.put_items([item])

    @router.post("/api/items")
    def insert_items(items: Annotated[list[ItemDescription], Body(max_length=MOST_EVENTS)]) -> ItemsStored:
        """Describe items. A model with features recommends them at once; hidden ones are not recommended."""
        return service.put_items(items)

    @router.get("/api/stats")
    def stats() -> Stats:
        """Figures about model, store and the last two minutes of this process."""
        totals = service.store.totals()
        return Stats.model_validate(
            {
                "Model": service.about(),
                "Users": totals.users,
                "Events": totals.events,
                "UnknownItems": totals.unknown,
                "Series": service.metrics.series(),
            }
        )

    return router


def sorted_events(events: Sequence[Feedback]) -> list[Event]:
    """The events of a request in the order of their times; equal times stay in the order given."""
    rows = [Event(one.FeedbackType, one.UserId, one.ItemId, microseconds(one.Timestamp), one.Value) for one in events]
    if len(rows) > 1:
        rows.sort(key=lambda row: math.inf if row.time is None else row.time)
    return rows


def _history(events: Sequence[SessionFeedback]) -> tuple[list[str], list[float]]:
    """Items and times in seconds, in the order of the times."""
    now = time.time()
    timed = [(now if (at := microseconds(one.Timestamp)) is None else at / 1e6, one.ItemId) for one in events]
    timed.sort(key=lambda pair: pair[0])
    return [item for _, item in timed], [at for at, _ in timed]


def _details(
    ids: Sequence[str], scores: Sequence[float], reasons: Sequence[Sequence[tuple[int, float]]], names: Any
) -> list[dict[str, Any]]:
    return [
        {
            "ItemId": item,
            "Score": score,
            "Because": [
                {"ItemId": str(names([row])[0]), "Similarity": round(similarity, 6)} for row, similarity in near
            ],
        }
        for item, score, near in zip(ids, scores, reasons, strict=True)
    ]
