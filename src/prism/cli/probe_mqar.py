"""`prism probe mqar`: how many pairs a memory can recall, in named settings. The trainings are those of `prism compare`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prism import rules as registry
from prism.cli.compare import run_plan
from prism.cli.probe import check_flags, read_set
from prism.files import check_target
from prism.lab.grid import RESULTS, Records, best_rate
from prism.lab.plan import FLAGS, Plan, make_plan
from prism.lab.results import recall_picture
from prism.lab.tasks.catalogue import build_task
from prism.lab.tasks.mqar import PRESETS, fewer_pairs
from prism.messages import did_you_mean
from prism.overrides import to_plain

_ZOOLOGY: dict[str, dict[str, Any]] = {
    "budget": {"steps": 3000, "batch": 64, "layers": 2, "width": 128, "heads": 2, "key_dim": [32], "evaluations": 1},
    "learning_rate": {"values": [3e-3]},
}
_LONG = {"budget": {**_ZOOLOGY["budget"], "width": 256, "key_dim": [64]}, "learning_rate": {"values": [1e-3]}}
"""The model and rate of experiments/zoology.toml."""
SETTINGS: dict[str, dict[str, Any]] = {
    "easy": {
        "budget": {"steps": 600, "batch": 64, "key_dim": [16], "evaluations": 1},
        "learning_rate": {"values": [1e-2]},
    },
    "starved": {
        "budget": {"steps": 900, "batch": 32, "key_dim": [8], "evaluations": 1},
        "learning_rate": {"values": [1e-2]},
    },
    "zoology-64": _ZOOLOGY,
    "zoology-128": _ZOOLOGY,
    "zoology-256": _LONG,
    "zoology-512": _LONG,
}
"""Budget and learning rates of each task in `PRESETS`, as in a plan."""


def mqar(
    rules: tuple[str, ...] = ("linear", "gated_delta", "prism:steps=2"),
    setting: tuple[str, ...] = ("easy", "starved"),
    seeds: int = 3,
    learning_rates: tuple[float, ...] = (),
    steps: int | None = None,
    pairs: int | None = None,
    layers: int | None = None,
    key_dim: tuple[int, ...] = (),
    set: tuple[str, ...] = (),
    device: str = "auto",
    jobs: int | None = None,
    output: Path = Path("runs/mqar"),
    retry: bool = False,
    dry_run: bool = False,
) -> int:
    """Compare rules on associative recall: how many pairs a memory of fixed size holds.

    Finished runs are kept: the same command after an interrupt continues, and more seeds are added to those there are.

    Args:
        rules: Rules to compare, with options after a colon: prism:steps=3,preset=paper. The first is the reference.
        setting: One or several of easy (8 pairs, room to spare), starved (16, twice as many as key dimensions), and the
            sizes of the Zoology paper: zoology-64, zoology-128, zoology-256, zoology-512 (sequences of so many tokens).
            Those of Zoology need a GPU, or hours.
        seeds: Number of final models for each rule and setting; their seeds are 0, 1, …
        learning_rates: Peak learning rates to try for every rule, on validation, with another seed. None given: the
            setting's single one, without a search.
        steps: Training steps. None: the setting's.
        pairs: Key-value pairs in a sequence, which grows to 4 · pairs where it is shorter. Tests also have 1/4, 1/2 and 3/4
            of them. None: the setting's.
        layers: Layers of the model. None: the setting's.
        key_dim: Key widths of a head; the state size is heads · key width · value width · layers. None given: the setting's.
        set: Options of the task as name=value, of the budget as budget.name=value (budget.match=parameters gives every rule
            as many parameters as the reference), of the search as learning_rate.name=value; for every setting.
        device: cpu, cuda and so on. auto: cuda if available, else cpu.
        jobs: Trainings side by side. None: one per core, or four on a GPU.
        output: Folder for results.jsonl, report.html and pictures: recall.png shows accuracy by the number of pairs.
        retry: Repeat runs that failed.
        dry_run: Show the runs with their parameters and state sizes, and train nothing.
    """
    check_flags(rules, key_dim, learning_rates, seeds=seeds, steps=steps, pairs=pairs, layers=layers, jobs=jobs)
    check_target(output, folder=True)
    flags: dict[str, dict[str, Any]] = {
        "budget": {"steps": steps, "layers": layers, "key_dim": list(key_dim) or None},
        "learning_rate": {"values": list(learning_rates) or None},
    }
    given = read_set(set)
    tasks = [_task(name, pairs, flags, given) for name in dict.fromkeys(setting)]
    if not tasks:
        raise ValueError(f"--setting is empty: name one or more of {', '.join(SETTINGS)}")
    plan = make_plan(
        {
            "title": "Rules on associative recall",
            "rules": list(rules),
            "seeds": list(range(seeds)),
            "device": device,
            "budget": {"steps": 1},  # a plan must have one; every task has its own steps, and sizes or their defaults
            "tasks": tasks,
        },
        FLAGS,
    )
    try:
        code = run_plan(plan, output, jobs, retry, dry_run=dry_run)
    except KeyboardInterrupt:
        _draw(plan, output)
        raise
    if not dry_run:
        _draw(plan, output)
    return code


def _task(name: str, pairs: int | None, flags: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The table [[tasks]] of a setting: what `--set` gives goes before flags, flags before the setting's values."""
    if name not in SETTINGS:
        raise ValueError(
            f"--setting {name!r} is unknown{did_you_mean(name, SETTINGS)}: choose from {', '.join(SETTINGS)}"
        )
    options = to_plain(PRESETS[name])
    if pairs is not None:
        options |= {"pairs": pairs, "length": max(options["length"], 4 * pairs), "test_pairs": list(fewer_pairs(pairs))}
    options |= given["task"]
    try:
        build_task("mqar", options)
    except ValueError as error:  # a plan would name the place in its list of tasks
        raise ValueError(f"--setting {name}: {error} (--set name=value changes an option)") from error
    own = {
        section: {
            **values,
            **{key: value for key, value in flags[section].items() if value is not None},
            **given[section],
        }
        for section, values in SETTINGS[name].items()
    }
    if "tokens" in own["budget"]:
        del own["budget"]["steps"]
    return {"task": "mqar", "label": name, "options": options, **own}


def _draw(plan: Plan, output: Path) -> None:
    """Draw recall.png from what there is of a plan."""
    records, lines = Records(output / RESULTS), []
    for entry in plan.entries:
        rate = best_rate(entry, records)
        finals = [] if rate is None else entry.final(rate)
        lines += [records.lines[training.key] for training in finals if training.key in records.lines]
    results = recall_results(lines)
    if results:
        recall_picture(results, output / "recall.png")
        print(f"picture: {(output / 'recall.png').resolve()}")


def recall_results(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Accuracy by the number of pairs of every final model, from lines of results.jsonl."""
    done = [line for line in lines if line["status"] == "done" and line["phase"] == "final"]
    sizes: dict[tuple[str, str], set[int]] = {}
    for line in done:
        sizes.setdefault((line["task"], line["rule"]), set()).add(line["state_size"])
    several = any(len(found) > 1 for found in sizes.values())
    return [
        {
            "setting": line["task"],
            "name": f"{line['rule']}, {line['state_size']:,}" if several else line["rule"],
            "seed": line["seed"],
            "accuracy": next(iter(line["result"]["scores"].values())),
            "accuracy_by_pairs": _by_pairs(line["result"]["scores"]),
            "baseline_by_pairs": _by_pairs(line["result"]["baseline"]),
            "state_size": line["state_size"],
            "grows": not registry.get(line["settings"]["model"]["rule"]).constant_state,
            "steps": line["settings"]["steps"],
            "task": line["settings"]["task_options"],
        }
        for line in done
    ]


def _by_pairs(scores: Mapping[str, float]) -> dict[int, float]:
    """Numbers by the labels of tests, `pairs=8`."""
    return {int(label.removeprefix("pairs=")): score for label, score in scores.items()}
