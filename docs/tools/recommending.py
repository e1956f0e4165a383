"""Tables of the recommender's benchmarks, from the results of single runs in experiments/results."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from evidence import Evidence
from wording import WIDTH, joined, number, paragraph, shown, table

import tables
from prism.lab.statistics import FEWEST, Estimate, estimate, paired

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


def same() -> str:
    """RecTools' SASRec with our definition: the scores of equal weights, and what training gives."""
    rows, said, commands, seeds = [], [], [], []
    for log, label in LOGS.items():
        if not (RESULTS / f"rectools_{log}_same.json").exists():
            continue
        found = read(f"rectools_{log}_same")
        results = found["results"]
        settings, check, runs = results["settings"], results["same_scores"], results["runs"]
        said.append(
            f"{label}, {check['users']:,} users: with the same weights scores differ by at most {check['same_weights']:.0e}"
            f" in float64, after ten steps from the same initial weights, without dropout and on all users at once, by"
            f" {check['trained_alike']:.0e} (the largest score is {check['largest_score']:.1f})."
        )
        for metric in ("HR@10", "NDCG@10"):
            ours, theirs = (estimate(run[metric] for run in runs[name]) for name in ("sasrec", "rectools-sasrec"))
            apart = Estimate(
                ours.mean - theirs.mean, math.hypot(ours.error, theirs.error), min(ours.count, theirs.count)
            )
            agree = "–" if apart.count < FEWEST else "yes" if abs(apart.mean) <= 2 * apart.error else "no"
            seeds.append(apart.count)
            cells = [f"{settings['epochs']}", shown(ours), shown(theirs), shown(apart, sign=True), agree]
            rows.append([label, metric, *cells])
        commands.append(found["command"])
    if not rows:
        return paragraph("Not measured yet.")
    header = ["data", "figure", "epochs", "ours", "RecTools", "difference", "agree"]
    weights = paragraph(*said)
    trained = paragraph(
        f"Trained with {min(seeds)} seeds on each side; figures agree if they differ by at most two standard errors:"
    )
    return joined(weights, trained, table(header, rows, left=2), _code(commands))


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
    quality, cost = ([row["ratios"][name] for row in rows] for name in ("test", "seconds"))
    said = (
        f"`{found['command']}`: trained on the first half of MovieLens-100K's time and updated with the second, a model",
        f"reaches {number(sum(quality) / len(quality), 2)} of the test NDCG@10 of one trained on the whole log",
        f"({', '.join(number(value, 2) for value in quality)} with {len(rows)} seeds; a log of this size is noisy)",
        f"in {number(min(cost), 2)} to {number(max(cost), 2)} of its time, each process on a core of its own.",
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


def earlier_claim() -> str:
    """What an earlier run with three seeds says of a memory and attention, of which means and errors were kept."""
    rows = Evidence().figures["recommenders"]["rows"]
    memory, attention = (f"{number(rows[name][0], 4)} ± {number(rows[name][1], 4)}" for name in ("prism-3", "sasrec"))
    gain, error = rows["prism-3"][2:4]
    return paragraph(
        "**Claim: a memory of fixed size recommends better than attention. On this log it",
        f"{'holds' if gain > 2 * error else 'does not hold'}: NDCG@10 {memory} (PRISM, L = 3) against {attention} (SASRec).**",
    )


def state() -> str:
    """What a user's state takes after the shortest and the longest history."""
    stored = tables.read()["recommendation-results-what-a-long-history-costs-1"]
    rows, lengths = {name: sizes for name, *sizes in stored["rows"]}, stored["header"][1:]
    sizes = rows["prism-2"]
    attention = float(rows["sasrec"][-1].replace(",", "")) / 1024
    return paragraph(
        "**Claim: state and the cost of one event do not grow with the history.",
        f"{'It holds' if len(set(sizes)) == 1 else 'It does not hold'}: {sizes[0]} KiB per user after {lengths[0]} events,"
        f" {sizes[-1]} KiB after {lengths[-1]}, where attention keeps {attention:.0f} MiB.**",
    )


def rectools_time() -> str:
    """Our SASRec next to RecTools' by the time of one training on a CPU."""
    stored = tables.read()["recommendation-results-on-a-cpu-compared-with-rectools-1"]
    times = {name: seconds for name, seconds, *_ in stored["rows"]}
    ours, theirs = times["our SASRec"], times["RecTools' SASRec"]
    return paragraph(
        "**Claim: at equal settings our SASRec is faster than RecTools'.",
        f"{'It holds' if float(ours) < float(theirs) else 'It does not hold'}: {ours} s against {theirs} s.**",
    )


def best_lines() -> list[dict[str, Any]]:
    """All runs of experiments/recommend_best.py."""
    text = (RESULTS / "recommend_best.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def best() -> str:
    """The search for the best recommender on MovieLens-1M."""
    lines = [line for line in best_lines() if line["candidate"] not in EQUAL]
    tested = [line for line in lines if line.get("test")]
    rows = []
    for name in dict.fromkeys(line["candidate"] for line in tested):
        runs = [line for line in tested if line["candidate"] == name]
        rows.append([LABELS.get(name, name), _budget(runs[0]), f"{runs[0]['parameters'] / 1e6:.2f} M", *_cells(runs)])
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
    header = ["candidate", "epochs, history", "parameters", *_HEADER]
    commands = dict.fromkeys(line["command"] for line in lines)
    return joined(
        table(header, rows, left=2), paragraph(*said), f"On an {lines[0]['machine']['gpu']}:", _code(commands)
    )


def equal() -> str:
    """Models of one budget, the hybrid's."""
    tested = [line for line in best_lines() if line.get("test") and line["candidate"] in (*EQUAL, HYBRID)]
    names = [name for name in (*EQUAL, HYBRID) if any(line["candidate"] == name for line in tested)]
    runs = {name: [line for line in tested if line["candidate"] == name] for name in names}
    ndcg = {name: {run["seed"]: run["test"]["NDCG@10"] for run in of} for name, of in runs.items()}
    rows = []
    for name, of in runs.items():
        apart = "" if name == "SASRec" else shown(paired(ndcg[name], ndcg.get("SASRec", {})), sign=True)
        rows.append([LABELS.get(name, name), f"{of[0]['parameters'] / 1e6:.2f} M", *_cells(of), apart])
    said = []
    missing = [name for name in (*EQUAL, HYBRID) if len(ndcg.get(name, {})) < 3]
    if missing:
        said.append(f"Not run with three seeds yet: {', '.join(missing)}.")
    validated = {name: estimate(run["validation"]["NDCG@10"] for run in of).mean for name, of in runs.items()}
    order = sorted(validated, key=lambda name: -validated[name])
    if len(order) > 1:
        first, second = order[:2]
        chosen = [shown(estimate(run["test"][figure] for run in runs[first])) for figure in ("HR@10", "NDCG@10")]
        said.append(
            f"Best in validation: {LABELS.get(first, first)}, with {chosen[0]} HR@10 and {chosen[1]} NDCG@10 in the test;"
            f" in the test its NDCG@10 minus that of the second, {LABELS.get(second, second)}, is"
            f" {shown(paired(ndcg[first], ndcg[second]), sign=True)}, seed by seed."
        )
    if "SASRec" in ndcg and "PRISM, L = 3" in ndcg:
        gain = paired(ndcg["PRISM, L = 3"], ndcg["SASRec"])
        held = "holds" if gain.significant and gain.mean > 0 else "does not hold"
        said.append(f"The claim above, that a memory of fixed size is better than attention, {held} with this budget.")
    header = ["model", "parameters", *_HEADER, "− SASRec"]
    commands = dict.fromkeys(line["command"] for line in tested)
    return joined(table(header, rows), paragraph(*said), _code(commands))


def logs() -> str:
    """A table per log of experiments/recommend.py: every model, and how far it is from SASRec and Gated DeltaNet."""
    groups = Evidence(RESULTS).of("recommendation")
    parts = []
    for log in dict.fromkeys(group.task for group in groups):
        found = {group.label: group for group in groups if group.task == log}
        models = {name: found[name] for name in NAMES if name in found}
        rows = [
            [
                NAMES[name],
                f"{(group.parameters or 0) / 1e6:.2f} M",
                *(shown(group.score(figure)) for figure in ("HR@10", "NDCG@10")),
                *(
                    "" if other == name or other not in models else shown(group.gain(models[other]), sign=True)
                    for other in ("sasrec", "gated_delta")
                ),
            ]
            for name, group in models.items()
        ]
        seeds = min(len(group.runs) for group in models.values())
        header = ["model", "parameters", "test HR@10", "test NDCG@10", "− SASRec", "− Gated DeltaNet"]
        parts.append(joined(paragraph(f"**{log}**, {seeds} seeds:"), table(header, rows)))
    return joined(*parts, _code(sorted({command for group in groups for command in group.commands})))


NAMES = {
    "sasrec": "SASRec",
    "gated_delta": "Gated DeltaNet",
    "prism-1": "PRISM, L = 1",
    "prism-2": "PRISM, L = 2",
    "prism-3": "PRISM, L = 3",
}
"""Models of experiments/recommend.py."""


def _cells(runs: Iterable[dict[str, Any]]) -> list[str]:
    runs = list(runs)
    return [shown(estimate(run[part][figure] for run in runs)) for part, figure in _COLUMNS]


def _budget(run: dict[str, Any]) -> str:
    """Epochs and longest history of a run: its own settings, or those of all."""
    words = [*run["settings"], *run["model"].partition("@")[2].split(",")]
    chosen = dict(word.split("=", 1) for word in words if "=" in word)
    return f"{chosen['epochs']}, {chosen['data.length']}"


EQUAL = ("SASRec", "HSTU", "Mamba-2", "Gated DeltaNet", "PRISM, L = 3")
HYBRID = "hybrid, history 400, 80 epochs"
LABELS = {HYBRID: "hybrid"}
_HEADER = ["validation NDCG@10", "test HR@10", "test NDCG@10"]
_COLUMNS = (("validation", "NDCG@10"), ("test", "HR@10"), ("test", "NDCG@10"))


def blocks() -> dict[str, Callable[[], str]]:
    """What writes each block."""
    return {
        "rec-claim": earlier_claim,
        "rec-state": state,
        "rec-time": rectools_time,
        "rec-peers": peers,
        "rec-sasrec": sasrec,
        "rec-update": update,
        "rec-catalogue": catalogue,
        "rec-best": best,
        "rec-equal": equal,
        "rec-same": same,
        "rec-logs": logs,
    }
