"""Which parts of `start="recall"` help? Small models on code, one part after the other, judged on validation alone.

    python -m experiments.recall_start data/code --out runs/recall_start --jobs 12

Every model starts with drawn weights, of which `PARTS` change some. Runs that are finished are not repeated; the results are
written to OUT/recall_start.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from prism.files import write_json
from prism.lab import text
from prism.lab.grid import Records, Training, run_grid
from prism.lab.results import machine
from prism.language.corpus import open_corpus
from prism.rules.delta import GatedDelta

RUN = {
    "batch": 16,
    "context": 512,
    "steps": 1500,
    "learning_rate": 2e-3,
    "precision": "bf16",
    "graph": True,
    "evaluations": 4,
    "test": False,
}
SIZE = {"hidden_size": 256, "num_hidden_layers": 6, "num_heads": 2}
HIDDEN = 512
"""Width of Gated DeltaNet's SwiGLU; other models get as many parameters."""
HEAD = {"key_dim": 64, "value_dim": 128, "conv_size": 4, "start": "drawn", "gate_by": "silu"}
NOISE = 0.3

DELTA = ("gated_delta", {"timescales": [1, 1024]})
PRISM = ("prism", {"step_scale": 1.0})
SMALL = ("prism", {"step_scale": [1.0, 0.1]})
VARIANTS: dict[str, tuple[tuple[str, dict[str, Any]], list[str]]] = {
    "gated_delta, as published": (("gated_delta", {}), []),
    "gated_delta": (DELTA, []),
    "gated_delta, equal q and k": (DELTA, ["maps", "convolutions"]),
    "gated_delta, look back": (DELTA, ["back"]),
    "gated_delta, equal maps, look back": (DELTA, ["maps", "back"]),
    "gated_delta, equal maps, all heads look back": (DELTA, ["maps", "all back"]),
    "gated_delta, equal maps, look back at two": (DELTA, ["maps", "two back"]),
    "gated_delta, recall": (DELTA, ["maps", "back", "values", "copy"]),
    "gated_delta, recall, gate × 3": (DELTA, ["maps", "back", "values", "copy", "gate"]),
    "prism": (PRISM, []),
    "prism, equal q and k": (PRISM, ["maps", "convolutions"]),
    "prism, equal maps, look back": (PRISM, ["maps", "back"]),
    "prism, equal maps, all heads look back": (PRISM, ["maps", "all back"]),
    "prism, equal maps, look back, γ .1": (("prism", {"step_scale": 0.1}), ["maps", "back"]),
    "prism, equal maps, look back, γ 1 to .1": (SMALL, ["maps", "back"]),
    "prism, equal maps, look back, γ 0 in slow heads": (PRISM, ["maps", "back", "fast only"]),
    "prism, equal maps, look back, shared key": (("prism", {"shared_key": True, "step_scale": 1.0}), ["maps", "back"]),
    "prism, recall, γ 1 to .1": (SMALL, ["maps", "back", "values", "copy"]),
    "prism, recall, γ 0 in slow heads": (PRISM, ["maps", "back", "values", "copy", "fast only"]),
    "prism, recall, γ 0 in slow heads, gate × 3": (PRISM, ["maps", "back", "values", "copy", "fast only", "gate"]),
    "prism, recall, γ 0 in slow heads, out × 2": (PRISM, ["maps", "back", "values", "copy", "fast only", "out"]),
    "prism, recall, shared key": (
        ("prism", {"shared_key": True, "step_scale": 1.0}),
        ["maps", "back", "values", "copy"],
    ),
    "prism, γ 3": (("prism", {"step_scale": 3.0}), []),
    "prism, previous keys": (("prism", {"keys": "previous", "step_scale": 1.0}), []),
    "prism, previous keys, equal q and k": (
        ("prism", {"keys": "previous", "step_scale": 1.0}),
        ["maps", "convolutions"],
    ),
    "prism, previous keys, γ .1, equal maps, all heads look back": (
        ("prism", {"keys": "previous", "step_scale": 0.1}),
        ["maps", "all back"],
    ),
}


def columns(rule: Any) -> SimpleNamespace:
    """The channels of queries, keys and values, and those of the keys of the slower half of the heads."""
    keys, slow = rule.sizes[0], rule.sizes[0] // rule.heads * (rule.heads // 2)
    return SimpleNamespace(
        q=slice(0, keys),
        k=slice(keys, 2 * keys),
        v=slice(2 * keys, None),
        fast=slice(keys, keys + slow),
        slow=slice(keys + slow, 2 * keys),
    )


def look(rule: Any, channels: slice, back: int, more: float = 0.0) -> None:
    """Let taps look `back` tokens back, and `more` at the one before that."""
    taps = rule.conv.weight
    taps[:, channels] *= NOISE
    taps[-1 - back, channels] += 1.0
    taps[-2 - back, channels] += more


def looks(rule: Any, fast: int, slow: int, more: float = 0.0) -> None:
    at = columns(rule)
    for channels, back in ((at.q, 0), (at.fast, fast), (at.slow, slow)):
        look(rule, channels, back, more)


PARTS: dict[str, Callable[[Any], Any]] = {
    "maps": lambda rule: rule.qkv.weight[columns(rule).q].copy_(rule.qkv.weight[columns(rule).k]),
    "convolutions": lambda rule: rule.conv.weight[:, columns(rule).q].copy_(rule.conv.weight[:, columns(rule).k]),
    "back": lambda rule: looks(rule, 0, 1),
    "all back": lambda rule: looks(rule, 1, 1),
    "two back": lambda rule: looks(rule, 0, 1, 0.5),
    "values": lambda rule: look(rule, columns(rule).v, 0),
    "copy": lambda rule: rule.out.weight.copy_(rule.qkv.weight[columns(rule).v].mT),
    "fast only": lambda rule: rule.writes.scale[:, rule.heads // 2 :].zero_(),
    "gate": lambda rule: rule.gate.weight.mul_(3.0),
    "out": lambda rule: rule.out.weight.mul_(2.0),
}


@torch.no_grad()
def change(model: nn.Module, parts: list[str]) -> None:
    """Apply parts of the start to a model whose weights were drawn."""
    for rule in model.modules():
        if isinstance(rule, GatedDelta):
            for part in parts:
                PARTS[part](rule)


def train(settings: Mapping[str, Any], report: text.Report) -> dict[str, Any]:
    """One training: `parts`, and the settings of a `TextRun`."""
    run = text.TextRun.of({name: value for name, value in settings.items() if name != "parts"})
    torch.set_num_threads(run.threads)
    corpus = open_corpus(Path(run.data), verify=False)
    task, stepper = text.prepare(run, corpus)
    change(stepper.model, settings["parts"])
    loop = text.Loop(run, task, stepper, report)
    loop.train()
    stepper.graphed = None
    model: Any = stepper.model.eval()
    with stepper.autocast():
        found = text.score_split(run, corpus, model, "validation", run.context)
    rare = found["bigrams"]["repeated_rare"]["nats_per_token"]
    count = text.count_parameters(model)
    return {"validation": found["nats_per_token"], "rare": rare, "parameters": count, "seconds": loop.seconds}


def width_for(rule: str, options: dict[str, Any], target: int) -> int:
    """The width of the SwiGLU, a multiple of 16, with which a model has about `target` parameters."""
    first, second = (text.sizes(config(rule, options, width), 8192)[0] for width in (HIDDEN, HIDDEN + 16))
    return HIDDEN + 16 * round((target - first) / (second - first))


def config(rule: str, options: dict[str, Any], hidden: int) -> dict[str, Any]:
    return {**SIZE, "layers": rule, "intermediate_size": hidden, "rule_options": {rule: {**HEAD, **options}}}


def trainings(data: str, device: Mapping[str, Any], seeds: list[int]) -> list[Training]:
    """All trainings, seed by seed."""
    target, found = text.sizes(config("gated_delta", {}, HIDDEN), 8192)[0], []
    for seed in seeds:
        for label, ((rule, options), parts) in VARIANTS.items():
            model = config(rule, options, width_for(rule, options, target))
            settings = {**RUN, **device, "data": data, "model": model, "seed": seed}
            about = {"rule": label, "seed": seed}
            name = f"{label}, seed {seed}"
            found.append(
                Training("experiments.recall_start:train", {**settings, "parts": parts}, about, name, settings["steps"])
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of prepared tokens")
    parser.add_argument("--out", type=Path, default=Path("runs/recall_start"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--cpu", action="store_true", help="one step of every run on a CPU, to see that all work")
    given = parser.parse_args()
    device = {"device": "cpu", "precision": "fp32", "graph": False, "steps": 1, "batch": 1} if given.cpu else {}
    chosen = trainings(given.data, device, given.seeds)
    records = Records(given.out / "results.jsonl")
    entries = [
        SimpleNamespace(rates=SimpleNamespace(values=(1,)), search=list, final=lambda _, t=t: [t]) for t in chosen
    ]
    run_grid(entries, records, given.jobs)
    rows = [{**t.about, **found} for t in chosen if (found := records.result(t)) is not None]
    command = " ".join(["python -m experiments.recall_start", *sys.argv[1:]])
    write_json(given.out / "recall_start.json", {"machine": machine(), "command": command, "results": rows})


if __name__ == "__main__":
    main()
