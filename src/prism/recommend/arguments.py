"""Checks of the arguments of `Recommender`: a wrong one is named in one sentence before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from prism.recommend.events.ids import is_list
from prism.recommend.states import UserStates


def one_of(
    of: Any, users: Sequence[Any] | None, sequences: Sequence[Any] | None, states: UserStates | None
) -> tuple[Sequence[Any] | None, Sequence[Any] | None, UserStates | None]:
    """Users, sequences and states, two of which are None; `of` is the one that its type says."""
    if sum(given is not None for given in (of, users, sequences, states)) != 1:
        raise ValueError("give exactly one of users, sequences and states")
    if isinstance(of, UserStates):
        states = of
    elif of is not None and is_list(of) and len(of) and all(is_list(one) for one in of):
        sequences = of
    elif of is not None:
        users = of
    check_list("users", users)
    check_list("sequences", sequences)
    if sequences is not None:
        _check_lists(sequences)
    return users, sequences, states


def check_count(name: str, given: Any, zero: str | None = None) -> None:
    """Refuse what is no integer of at least 1; `zero` says what 0 means, where it is allowed."""
    least = 1 if zero is None else 0
    if not isinstance(given, Integral) or isinstance(given, bool) or given < least:
        allowed = "" if zero is None else f", or 0 for {zero}"
        raise ValueError(f"{name} must be an integer of at least 1{allowed}, got {given!r}")


def check_share(name: str, given: Any) -> None:
    if not isinstance(given, Real) or isinstance(given, bool) or not 0 <= float(given) <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {given!r}")


def check_list(name: str, given: Any) -> None:
    if given is not None and not is_list(given):
        raise ValueError(f"{name} must be a list, got {given!r}")


def _check_lists(sequences: Sequence[Any]) -> None:
    """Refuse a flat list of items: it would be taken as one-item histories of many users."""
    for one in sequences:
        if one is not None and not is_list(one):
            raise ValueError(
                f"sequences must be a list of histories, each a list of items, got the item {one!r}: "
                "write sequences=[[…]] for one history"
            )
