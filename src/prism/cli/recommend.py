"""`prism recommend`: the next items for known users, for a sequence of items, or for saved states."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from prism.files import check_state_target
from prism.messages import say
from prism.recommend import Recommendations, Recommender, UserStates


def recommend(
    model: Positional[Path],
    users: tuple[str, ...] = (),
    sequence: tuple[str, ...] = (),
    times: tuple[float, ...] = (),
    states: Path | None = None,
    save_states: Path | None = None,
    k: int = 10,
    filter_seen: bool = True,
    exclude: tuple[str, ...] = (),
    max_length: int | None = None,
    data: str | None = None,
    json: bool = False,
    device: str = "auto",
) -> None:
    """Recommend the next items for known users, after a sequence of items, or for saved states.

    Without --users, --sequence and --states, recommend for a new user, who gets the most popular items.

    Args:
        model: folder of a saved recommender, or run folder of `prism train rec`.
        users: ids of users in the training events, or in --data.
        sequence: item ids of one history, in order; with --states, the new events of its one user.
            Items that the model does not know are dropped, with a warning.
        times: times of the events of --sequence, in the unit of the training events, for models with time gaps.
        states: file of user states, written with --save-states; its users are 0, 1, …
        save_states: write the states after the sequence to this file (.safetensors); --states continues from it.
        k: number of items per user.
        filter_seen: leave out items of the history. A state does not remember items: use --exclude with --states.
        exclude: items to leave out.
        max_length: number of last events to read. None: as many as in training. 0: all. A state has read all.
        data: file of events to find the users in. None: the training events.
        json: print JSON, one line per user.
        device: cpu, cuda, cuda:1 … auto: cuda if available.
    """
    if save_states is not None:
        check_state_target(save_states, "save_states")
    if users and (sequence or times or states or save_states):
        raise ValueError(
            "--users cannot be used with --sequence, --times, --states or --save-states: their histories are in the events"
        )
    if (states or save_states) and max_length is not None:
        raise ValueError("a state has read all events: --max-length cannot be used with --states and --save-states")
    with _plain_warnings():
        recommender = Recommender.load(model, data, device)
        event_times = [times] if times else None
        if users:
            unwanted = [exclude] * len(users)
            found = recommender.recommend(users, k=k, filter_seen=filter_seen, exclude=unwanted, max_length=max_length)
        elif states is None and save_states is None:
            found = recommender.recommend(
                sequences=[sequence],
                k=k,
                filter_seen=filter_seen,
                exclude=[exclude],
                times=event_times,
                max_length=max_length,
            )
        else:
            current = recommender.start(1) if states is None else UserStates.load(states, recommender.device)
            if sequence:
                if len(current) != 1:
                    raise ValueError(f"{states} holds {len(current)} users: --sequence needs the state of one user")
                current = recommender.observe(current, [sequence], event_times)
            had = sequence if filter_seen else ()
            found = recommender.recommend(states=current, k=k, exclude=[(*exclude, *had)] * len(current))
            if save_states is not None:
                current.save(save_states)
    names: Sequence[Any] = users or range(len(found))
    if json:
        _print_json(found, names)
    else:
        _print_table(found, names)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings without the line of code they come from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        say(str(warning.message))


def _print_json(found: Recommendations, names: Sequence[Any]) -> None:
    for name, items in zip(names, found, strict=True):
        print(dumps({"user": name, "items": [item for item, _ in items], "scores": [score for _, score in items]}))


def _print_table(found: Recommendations, names: Sequence[Any]) -> None:
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("for", "rank", "item", "score"):
        table.add_column(column, justify="left" if column in ("for", "item") else "right")
    for name, items in zip(names, found, strict=True):
        for rank, (item, score) in enumerate(items, 1):
            table.add_row(str(name) if rank == 1 else "", str(rank), str(item), f"{score:.4f}")
    Console(highlight=False).print(table)
