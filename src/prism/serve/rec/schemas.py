"""Bodies of the recommender's API, with Gorse's names."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, StringConstraints, model_validator
from pydantic_core import PydanticSerializationError

from prism.serve.rec.settings import LONGEST_ID, MOST_EVENTS

_PLAIN = r"^[^\x00-\x1f\x7f]+$"
PATH_SAFE = r"^[^/\x00-\x1f\x7f]+$"
"""No slash: the id is part of a path."""
Item = Annotated[str, Strict(), StringConstraints(min_length=1, max_length=LONGEST_ID, pattern=_PLAIN)]
User = Annotated[str, Strict(), StringConstraints(min_length=1, max_length=LONGEST_ID, pattern=PATH_SAFE)]


_DATE = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d", re.ASCII)


def _only_text(value: Any) -> Any:
    """Refuse what is no date and time in ISO 8601; pydantic would also take numbers, as text too."""
    if value is not None and value != "" and not (isinstance(value, str) and _DATE.match(value)):
        raise ValueError("must be text in ISO 8601, such as 2026-01-31T12:00:00Z")
    return value


Time = Annotated[datetime | Literal[""] | None, BeforeValidator(_only_text)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]


class Feedback(BaseModel):
    """One event of a user."""

    FeedbackType: User = Field(description="Such as click, buy or like. The model reads all types alike.")
    UserId: User
    ItemId: Item
    Timestamp: Time = Field(None, description="ISO 8601. Missing or empty: when it is stored.")
    Value: Number | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "FeedbackType": "click",
                "UserId": "ann",
                "ItemId": "hat",
                "Timestamp": "2026-01-31T12:00:00Z",
            }
        }
    )


class SessionFeedback(BaseModel):
    """One event of a visitor; only item and time matter."""

    FeedbackType: str = ""
    UserId: str = ""
    ItemId: Item
    Timestamp: Time = None
    Value: Number | None = None


class RowAffected(BaseModel):
    """How many rows a request changed."""

    RowAffected: int


class Reason(BaseModel):
    """An item of the history that is near to a recommended one."""

    ItemId: str
    Similarity: float = Field(description="Cosine of the items' vectors.")


class Detail(BaseModel):
    """A recommended item and why."""

    ItemId: str
    Score: float
    Because: list[Reason]


class Score(BaseModel):
    """A recommended item and its score."""

    Id: str
    Score: float
    Because: list[Reason] | None = Field(None, description="With `detail`: the nearest items of the history.")


class Candidate(BaseModel):
    id: Item


class RankRequest(BaseModel):
    """Candidates, and the user or the history that they are scored for. Without both: a new visitor."""

    user: User | None = None
    history: Annotated[list[Item], Field(max_length=MOST_EVENTS)] | None = Field(None, description="Oldest first.")
    items: Annotated[list[Candidate | Item], Field(max_length=MOST_EVENTS)]

    model_config = ConfigDict(
        json_schema_extra={
            "not": {
                "required": ["user", "history"],
                "properties": {"user": {"type": "string"}, "history": {"type": "array"}},
            }
        }
    )


class Ranked(BaseModel):
    item: str
    score: float | None = Field(description="null for an item that the model does not know.")
    known: bool


class RankResponse(BaseModel):
    """Candidates, best first; those that the model does not know come last."""

    items: list[Ranked]
    took: float = Field(description="Milliseconds.")


class HistoryEvent(BaseModel):
    FeedbackType: str
    ItemId: str
    Timestamp: str
    Value: float | None
    Known: bool = Field(description="Whether the model knows the item.")


class UserResponse(BaseModel):
    """A user, the newest events first."""

    UserId: str
    EventCount: int
    StateAge: float | None = Field(description="Seconds since the state was last updated; null without a state.")
    StateEvents: int = Field(description="Events that the state has read.")
    StateBytes: int
    Feedback: list[HistoryEvent]


class FoundUser(BaseModel):
    UserId: str
    EventCount: int


class FoundItem(BaseModel):
    ItemId: str
    Count: int = Field(description="Events of the item in training.")


class ItemDescription(BaseModel):
    """An item, in Gorse's form."""

    ItemId: Item
    IsHidden: Annotated[bool, Strict()] = Field(False, description="Whether the item must not be recommended.")
    Categories: list[str] | None = None
    Timestamp: Time = None
    Labels: Any = Field(
        None,
        description="Features by name, for models that were trained with features: a value, a list of values or a vector "
        "each. A plain list goes to the only feature of lists.",
    )
    Comment: str | None = None

    @model_validator(mode="after")
    def _can_be_stored(self) -> ItemDescription:
        """JSON may hold half a character and lists of any depth, which cannot be written as JSON in UTF-8 again."""
        try:
            self.model_dump_json()
        except PydanticSerializationError as error:
            raise ValueError(
                "cannot be stored: give whole characters (\\ud800 is half a one), and Labels at most 200 levels deep"
            ) from error
        return self


class ItemsStored(BaseModel):
    """What became of items that were described."""

    RowAffected: int
    Known: int = Field(description="Items that the model was trained on.")
    Scored: int = Field(description="Other items, which the model scores by their features.")
    Message: str = Field(description="Which items are not scored and why, and the features that the model has.")


class ModelFacts(BaseModel):
    name: str
    layers: str
    items: int
    parameters: int
    state_bytes: int


class Progress(BaseModel):
    Done: int
    Total: int


class Series(BaseModel):
    """The last 120 seconds of this process, oldest first."""

    Second: list[int]
    Events: list[int]
    Requests: list[int]
    P50: list[float] = Field(description="Milliseconds.")
    P99: list[float] = Field(description="Milliseconds.")


class Stats(BaseModel):
    """Figures for the page."""

    Model: ModelFacts
    Users: int
    Events: int
    UnknownItems: int = Field(description="Events whose item the model did not know when they came.")
    Rebuild: Progress | None = Field(description="Users read again after the model changed; null when done.")
    Series: Series


def microseconds(when: datetime | Literal[""] | None) -> int | None:
    """Microseconds since 1970, UTC; None for no time. A time without a zone is UTC."""
    if not isinstance(when, datetime):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    delta = when - datetime(1970, 1, 1, tzinfo=UTC)
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def iso(microseconds: int) -> str:
    """A stored time as text."""
    seconds, rest = divmod(microseconds, 1_000_000)
    try:
        when = datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest)
    except (OverflowError, ValueError, OSError):  # before the year 1, by a time zone
        return str(microseconds)
    return when.isoformat().replace("+00:00", "Z")
