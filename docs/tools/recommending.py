"""Tables of the recommender's benchmarks, from the results of single runs in experiments/results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from wording import WIDTH, joined, number, paragraph, shown, table

from prism.compare.statistics import estimate

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
LOGS = {"ml-100k": "MovieLens-100K", "ml-1m": "MovieLens-1M"}
MODELS = {"ease": "EASE, λ = 500", "als": "ALS, 64 factors"}


def read(name: str) -> Any:
    """A file of results, with its command."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def scores(runs: Iterable[dict[str, Any]]) -> str:
    """Mean NDCG@10 and standard error over seeds; one figure where a model has no randomness."""
    values = [run["NDCG@10"] for run in runs]
    return number(values[0], 4) if len(set(values)) == 1 else shown(estimate(values))


def peers() -> str:
    """Our EASE and ALS next to RecTools', on two logs, with the validation and with the test events ranked."""
    rows, commands = [], []
    for log, label in LOGS.items():
        for model, what in MODELS.items():
            cells = []
            for part in ("validation", "test"):
                found = read(f"rectools_{log}_{part}")
                runs = found["results"]["runs"]
                cells += [scores(runs[name]) for name in (model, f"rectools-{model}")]
                commands += [found["command"]] if found["command"] not in commands else []
            rows.append([label, what, *cells])
    header = ["data", "model", "validation, ours", "RecTools", "test, ours", "RecTools"]
    said = paragraph("NDCG@10, mean ± standard error over seeds 0, 1, 2:")
    return joined(said, table(header, rows, left=2), _code(commands))


def sasrec() -> str:
    """Our SASRec next to RecTools'."""
    rows, commands = [], []
    for name in ("rectools_ml-100k_test", "rectools_ml-100k_long", "rectools_ml-1m_sasrec", "rectools_ml-1m_long"):
        found = read(name)
        settings, runs = found["results"]["settings"], found["results"]["runs"]
        cells = [scores(runs[model]) for model in ("sasrec", "rectools-sasrec")]
        trained = "as RecTools" if settings.get("plain") else "with our schedule"
        log = next(label for key, label in LOGS.items() if key in name)
        rows.append([log, f"{settings['epochs']}, {trained}", f"{len(runs['sasrec'])}", *cells])
        commands.append(found["command"])
    header = ["data", "epochs", "seeds", "NDCG@10, ours", "RecTools"]
    return joined(table(header, rows, left=2), _code(commands))


def _code(commands: Iterable[str]) -> str:
    """Commands as a block, broken between words so that they fit and still run."""
    lines: list[str] = ["```sh"]
    for command in commands:
        line = ""
        for word in map(shlex.quote, shlex.split(command)):
            if line and len(line) + len(word) + 1 > WIDTH - 2:
                lines.append(f"{line} \\")
                line = f"    {word}"
            else:
                line = f"{line} {word}" if line else word
        lines.append(line)
    return "\n".join([*lines, "```"])


def update() -> str:
    """What continuing a training costs and reaches."""
    found = read("update")
    rows = found["results"]["rows"]
    quality, cost = ([row["ratios"][name] for row in rows] for name in ("test", "cpu_seconds"))
    said = (
        f"`{found['command']}`: trained on the first half of MovieLens-100K's time and updated with the second, a model",
        f"reaches {number(sum(quality) / len(quality), 2)} of the test NDCG@10 of one trained on the whole log",
        f"({', '.join(number(value, 2) for value in quality)} with {len(rows)} seeds; one of a seed has a sampling error of",
        f".006) in {number(min(cost), 2)} to {number(max(cost), 2)} of its processor time.",
    )
    return paragraph(*said)


def catalogue() -> str:
    """A catalogue of a million items."""
    found = read("large_catalogue")
    results = found["results"]
    first, ranked = results["recommend"], results["evaluate"]
    machine = found["machine"]
    return paragraph(
        f"On {machine['cores']} cores of an {machine['cpu']}, {first['users']:,} users and {first['items']:,} items:"
        f" {first['seconds']['all']:.0f} s and {first['peak_MiB'] / 1024:.1f} GiB at the peak for the lists,"
        f" {first['seconds']['read']:.0f} s of it for reading the histories; {ranked['seconds']['all']:.0f} s and"
        f" {ranked['peak_MiB'] / 1024:.1f} GiB for ranking a held-out event of each with all metrics."
    )


def best() -> str:
    """The search for the best recommender on MovieLens-1M."""
    lines = [json.loads(text) for text in (RESULTS / "recommend_best.jsonl").read_text(encoding="utf-8").splitlines()]
    tested = [line for line in lines if line.get("test")]
    rows = []
    for name in dict.fromkeys(line["candidate"] for line in tested):
        runs = [line for line in tested if line["candidate"] == name]
        cells = [shown(estimate(run[part][figure] for run in runs)) for part, figure in _COLUMNS]
        rows.append([name, f"{runs[0]['parameters'] / 1e6:.2f} M", *cells])
    searched = {
        line["candidate"]: line for line in lines if not line.get("test")
    }  # a later line replaces an earlier one
    ended = sorted(
        ((line["validation"]["NDCG@10"], name) for name, line in searched.items() if "validation" in line), reverse=True
    )
    stopped = [name for name, line in searched.items() if line["status"] == "stopped"]
    said = [f"Validation NDCG@10 in the search, one seed: {'; '.join(f'{name} {number(v, 4)}' for v, name in ended)}."]
    if stopped:
        said.append(f"Not finished within the search's time, so not chosen: {'; '.join(stopped)}.")
    header = ["candidate", "parameters", "validation NDCG@10", "test HR@10", "test NDCG@10"]
    commands = dict.fromkeys(line["command"] for line in lines)
    return joined(table(header, rows), paragraph(*said), f"On an {lines[0]['machine']['gpu']}:", _code(commands))


_COLUMNS = (("validation", "NDCG@10"), ("test", "HR@10"), ("test", "NDCG@10"))


def blocks() -> dict[str, Callable[[], str]]:
    """What writes each block."""
    return {
        "rec-peers": peers,
        "rec-sasrec": sasrec,
        "rec-update": update,
        "rec-catalogue": catalogue,
        "rec-best": best,
    }
