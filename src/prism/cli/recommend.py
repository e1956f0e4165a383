"""`prism recommend`: the next items for users, for sequences of items or for saved states; items similar to an item."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, UseAppendAction, arg

from prism.files import check_parent, check_state_target, check_target, not_there, write_atomically
from prism.messages import say, verbatim
from prism.recommend import Recommendations, Recommender, UserStates

ENDINGS = (".csv", ".parquet", ".jsonl")


def recommend(
    model: Positional[Path],
    users: tuple[str, ...] = (),
    all_users: bool = False,
    sequences: Annotated[UseAppendAction[tuple[tuple[str, ...], ...]], arg(aliases=("--sequence",))] = (),
    times: UseAppendAction[tuple[tuple[float, ...], ...]] = (),
    states: Path | None = None,
    save_states: Path | None = None,
    similar_to: tuple[str, ...] = (),
    k: int = 10,
    filter_seen: bool = True,
    exclude: tuple[str, ...] = (),
    allowed: tuple[str, ...] = (),
    allowed_file: Path | None = None,
    where: tuple[str, ...] = (),
    diversify: float = 0.0,
    max_length: int | None = None,
    data: str | None = None,
    json: bool = False,
    output: Path | None = None,
    device: str = "auto",
) -> None:
    """Recommend the next items for users, after sequences of items, or for saved states; or find similar items.

    Without --users, --sequences, --states and --similar-to, recommend for a new user, who gets the most popular items.

    Args:
        model: folder of a saved recommender, or run folder of `prism train rec`.
        users: ids of users in the training events, or in --data. An unknown one gets the most popular items.
        all_users: recommend for all users in the events.
        sequences: item ids of one history, in order; give the flag again for each further history. With --states, the new
            events of its users. Items that the model does not know are dropped, with a warning.
        times: times of the events of a sequence, in the unit of the training events, for models with time gaps; once for each
            sequence.
        states: file of user states, written with --save-states; its users are 0, 1, …
        save_states: write the states of the users, or after the sequences, to this file (.safetensors).
        similar_to: ids of items to find similar ones for.
        k: number of items per user.
        filter_seen: leave out items of the history.
        exclude: items to leave out.
        allowed: the only items to choose from.
        allowed_file: the same, from a file with one id per line.
        where: features that an item must have, as name=value, such as genre=Drama. Several values of a name: one of them.
        diversify: from 0 (best scores) to 1 (items as unlike each other as possible).
        max_length: number of last events to read. None: as many as in training. 0: all. A state has read all.
        data: file of events to find the users in. None: the training events.
        json: print JSON, one line per user.
        output: write to this file instead: .csv or .parquet (a row per item), or .jsonl (a line per user).
        device: cpu, cuda, cuda:1 … auto: cuda if available.
    """
    if save_states is not None:
        check_state_target(save_states, "save_states")
    if output is not None:
        check_parent(check_target(output, folder=False))
        if output.suffix not in ENDINGS:
            raise ValueError(f"output must end in {', '.join(ENDINGS)}, got {output}")
    _check_choice(users, all_users, sequences, times, states, save_states, similar_to, max_length)
    filters: dict[str, Any] = {"k": k, "allowed": _allowed(allowed, allowed_file), "where": _features(where)}
    with _plain_warnings():
        recommender = Recommender.load(model, data, device)
        if similar_to:
            found = recommender.similar_items(similar_to, **filters)
        else:
            how = {**filters, "filter_seen": filter_seen, "diversify": diversify}
            if all_users:
                users = tuple(recommender.known_users())
            if states is None and save_states is None:
                rows = len(users) or max(1, len(sequences))
                given: Any = {"users": users} if users else {"sequences": sequences or [()], "times": times or None}
                found = recommender.recommend(
                    **given, **how, exclude=[exclude] * rows if exclude else None, max_length=max_length
                )
            else:
                current = _states(recommender, states, users, sequences, times)
                unwanted = [exclude] * len(current) if exclude else None
                found = recommender.recommend(states=current, **how, exclude=unwanted)
                if users and recommender.users is not None:  # a state does not know whose it is
                    names = recommender.users.names(recommender.users.index(users))
                    found = replace(found, users=recommender.source.users(names))
                if save_states is not None:
                    current.save(save_states)
    _write(found, json, output, k)


def _check_choice(
    users: tuple[str, ...],
    all_users: bool,
    sequences: Sequence[Any],
    times: Sequence[Any],
    states: Path | None,
    save_states: Path | None,
    similar_to: tuple[str, ...],
    max_length: int | None,
) -> None:
    """Refuse flags that say whom to recommend for in two ways."""
    if users and all_users:
        raise ValueError("--users cannot be used with --all-users: give one of them")
    if (users or all_users) and (sequences or times or states):
        flag = "--users" if users else "--all-users"
        raise ValueError(
            f"{flag} cannot be used with --sequences, --times or --states: the histories of users are in the events"
        )
    if similar_to and (users or all_users or sequences or times or states or save_states):
        raise ValueError("--similar-to finds items for items: it cannot be used with users, sequences or states")
    if times and len(times) != len(sequences):
        raise ValueError(f"--times must be given once for each of the {len(sequences)} --sequences, got {len(times)}")
    if (states or save_states) and max_length is not None:
        raise ValueError("a state has read all events: --max-length cannot be used with --states and --save-states")


def _states(
    recommender: Recommender,
    states: Path | None,
    users: Sequence[str],
    sequences: Sequence[Sequence[str]],
    times: Sequence[Sequence[float]],
) -> UserStates:
    """The states of users, or saved ones, or new ones; after the sequences."""
    if users:
        return recommender.resume(users)
    current = (
        recommender.start(max(1, len(sequences))) if states is None else UserStates.load(states, recommender.device)
    )
    if not sequences:
        return current
    if len(current) != len(sequences):
        raise ValueError(
            f"{states} holds {len(current)} users: give --sequences once for each of them, got {len(sequences)}"
        )
    return recommender.observe(current, sequences, times or None)


def _allowed(ids: tuple[str, ...], file: Path | None) -> list[str] | None:
    if file is not None and not file.is_file():
        raise FileNotFoundError(not_there(str(file)))
    lines = [] if file is None else file.read_text(encoding="utf-8-sig").splitlines()
    return [*ids, *(line.strip() for line in lines if line.strip())] if ids or file is not None else None


def _features(words: Sequence[str]) -> dict[str, list[str]]:
    """`name=value …` as the values of each name."""
    found: dict[str, list[str]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"--where takes name=value, such as genre=Drama, got {word!r}")
        found.setdefault(name, []).append(value)
    return found


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings without the line of code they come from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        say(str(warning.message))


def _write(found: Recommendations, json: bool, output: Path | None, k: int) -> None:
    """Print the recommendations, or write them to a file."""
    if output is None and json:
        print("\n".join(_json_lines(found)))
    elif output is None:
        _print_table(found)
    else:
        if output.suffix == ".jsonl":
            content = "".join(f"{line}\n" for line in _json_lines(found)).encode()
        else:
            frame, file = found.to_polars(), io.BytesIO()
            frame.write_csv(file) if output.suffix == ".csv" else frame.write_parquet(file)
            content = file.getvalue()
        write_atomically(output, content)
        print(f"written to {output}: {len(found):,} lists of up to {k} items")


def _json_lines(found: Recommendations) -> Iterator[str]:
    fallback = [False] * len(found) if found.fallback is None else found.fallback.tolist()
    first = "user" if found.columns is None else "item"
    for name, items, popular in zip(found.keys, found, fallback, strict=True):
        line = {first: name, "items": [item for item, _ in items], "scores": [score for _, score in items]}
        yield dumps(line if found.columns else {**line, "fallback": popular}, ensure_ascii=False)


def _print_table(found: Recommendations) -> None:
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("for", "rank", "item", "score"):
        table.add_column(column, justify="left" if column in ("for", "item") else "right")
    for name, items in zip(found.keys, found, strict=True):
        for rank, (item, score) in enumerate(items, 1):
            table.add_row(*verbatim([str(name) if rank == 1 else "", str(rank), str(item), f"{score:.4f}"]))
    Console(highlight=False).print(table)
