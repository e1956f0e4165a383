"""Measure what a longer history costs a recommender: to train on, to read again, and to add one event to.

    python benchmarks/history_length.py                       # the plot of docs/recommendation-results.md; slow without a GPU
    python benchmarks/history_length.py --lengths 64 256      # a minute on a laptop

Every training batch has the same number of events, however long the histories are. "Read again" encodes the whole history of
a batch of users; "one event" takes the state after it and adds a single event of every user, which is what a service does.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from prism.lab.results import write_results
from prism.models import PrismForRecommendation
from prism.models.config import PrismRecConfig, hstu, sasrec
from prism.models.losses import full_softmax

ITEMS, WIDTH, HEADS, LAYERS = 3416, 128, 2, 2
MODELS: dict[str, Callable[..., PrismRecConfig]] = {
    "sasrec": sasrec,
    "hstu": hstu,
    "gated_delta": lambda n, **o: PrismRecConfig(n, layers="gated_delta", **o),
    "prism-2": lambda n, **o: PrismRecConfig(n, layers="prism", **o),
}


def milliseconds(work: Callable[[], Any], device: str, repeats: int) -> float:
    """The median time of `work`, after one call that compiles and warms up."""
    taken = []
    for i in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if i:
            taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken)


def measure(name: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per length."""
    torch.manual_seed(0)
    device = arguments.device
    config = MODELS[name](ITEMS, hidden_size=WIDTH, num_heads=HEADS, num_hidden_layers=LAYERS, dropout=0.0)
    model = PrismForRecommendation(config).to(device)
    for length in arguments.lengths:
        rows = max(1, arguments.events // length)
        items = torch.randint(1, ITEMS + 1, (rows, length + 1), device=device)
        row: dict[str, Any] = {"model": name, "length": length, "batch": rows}
        try:

            def train(items: torch.Tensor = items) -> None:
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    hidden = model(items[:, :-1]).hidden
                    full_softmax(hidden, model.item_vectors(), items[:, 1:]).backward()
                model.zero_grad(set_to_none=True)

            taken = milliseconds(train, device, arguments.repeats)
            row["train_events_per_second"] = rows * length / taken * 1e3
            with torch.inference_mode():
                users = torch.randint(1, ITEMS + 1, (arguments.users, length), device=device)
                one = users[:, :1]

                def read(users: torch.Tensor = users) -> Any:
                    return model(users, use_cache=True).past_key_values

                row["read_milliseconds"] = milliseconds(read, device, arguments.repeats)
                state = read()
                row["state_bytes_a_user"] = state.nbytes // arguments.users

                def add(state: Any = state, one: torch.Tensor = one) -> None:
                    model.scores(model(one, past_key_values=state.copy(), use_cache=True).hidden[:, -1])

                row["one_event_milliseconds"] = milliseconds(add, device, 3 * arguments.repeats)
        except torch.OutOfMemoryError:
            row["out_of_memory"] = True
            torch.cuda.empty_cache()
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[64, 256, 1024, 4096, 16384])
    parser.add_argument("--events", type=int, default=65536, help="events in a training batch")
    parser.add_argument(
        "--users", type=int, default=16, help="users whose histories are read, or get one event, in one batch"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "history_length.json")
    arguments = parser.parse_args()
    rows = []
    command = shlex.join(["python", "benchmarks/history_length.py", *sys.argv[1:]])
    for name in arguments.models:
        for row in measure(name, arguments):
            rows.append(row)
            shown = [f"{key.replace('_', ' ')} {value:,.2f}" for key, value in row.items() if isinstance(value, float)]
            print(f"{name:<12} {row['length']:>6} events: {', '.join(shown) or 'out of memory'}", flush=True)
        write_results(arguments.output, rows, command=command, users=arguments.users, events=arguments.events)
    print("written to", arguments.output)


if __name__ == "__main__":
    main()
