"""Fine-tune a pretrained Gated DeltaNet with LoRA, a PRISM adapter, or both, at equal numbers of trained parameters.

    python experiments/adapters.py novels.txt.xz docs.txt.xz    # experiments/results/adapters.jsonl, docs/images/adapters.png
    python experiments/adapters.py --draw                       # the picture alone, from the results

For every seed, a small model of bytes is pretrained on the first text and frozen. Then each method fine-tunes it, once on the
second text and once on associative recall (`prism.lab.tasks.mqar`) with letters for keys and values: pairs as `re`, `da`
are shown, then keys alone, at each of which the model should answer with its value. LoRA is on all linear maps. The PRISM
adapter has the rank at which it trains about as many parameters. With both, each has half.

Every method tries the same learning rates with the first seed. The best on validation is used for all seeds, and only the
score on test is reported. Steps are timed in the same process, by turns.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import lzma
import math
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

from prism import __version__
from prism.hf.adapters import PrismAdapterConfig
from prism.lab.results import COLORS, machine, pyplot, save
from prism.lab.statistics import estimate
from prism.lab.tasks.mqar import Recall
from prism.lab.tasks.task import IGNORE
from prism.models import PrismConfig, PrismForCausalLM

ROOT = Path(__file__).parents[1]
METHODS = ("base", "lora", "prism", "both")
NAMES = {"base": "base", "lora": "LoRA", "prism": "PRISM adapter", "both": "both, half each"}
TASKS = {"adapter text": ("nats a byte", "lower"), "adapter recall": ("accuracy", "higher")}
SETTINGS: dict[str, Any] = {
    "width": 64,
    "heads": 2,
    "layers": 2,
    "context": 128,
    "batch": 16,
    "pretraining_steps": 250,
    "pretraining_rate": 6e-3,
    "steps": 70,
    "decay": 0.7,
    "recall_steps": 250,
    "recall_decay": 0.2,
    "learning_rates": [8e-3, 2.4e-2],
    "lora_rank": 4,
    "pairs": 2,
    "length": 16,
    "recall_batch": 64,
    "test_rows": 192,
    "megabytes": 24,
    "timed_widths": [64, 256],
    "timed_steps": 10,
}
LETTERS = torch.tensor(list(b" rdlucmfetaoinsh"))
"""The bytes of the tokens of `Recall`: filler, 7 keys, 8 values. All are frequent, so that pretraining has seen them."""
VALIDATION, TEST = 1_000_000, 2_000_000
"""Added to the seeds of recall. A generator on the CPU ignores all but the last 32 bits of its seed."""
Sample = Callable[[torch.Generator], tuple[Tensor, Tensor]]


def read(path: Path, megabytes: float) -> dict[str, Tensor]:
    """The beginning of a text as bytes: 90 % for training, then 5 % for validation and 5 % for test."""
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        text = torch.frombuffer(bytearray(file.read(int(megabytes * 1e6))), dtype=torch.uint8)
    cuts = [0, *(int(len(text) * share) for share in (0.9, 0.95, 1.0))]
    names = ("train", "validation", "test")
    return {name: text[start:end] for name, start, end in zip(names, cuts, cuts[1:], strict=False)}


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Bytes `[B, T]` from the given places, and the bytes that follow each of them."""
    rows = text[starts.unsqueeze(1) + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def drawn(text: Tensor, context: int, batch: int) -> Sample:
    """Windows from random places."""
    return lambda random: windows(text, torch.randint(len(text) - context, (batch,), generator=random), context)


def recall(settings: dict[str, Any], count: int) -> Sample:
    """Sequences of letters, and the answers where a key is asked."""
    task = Recall(settings["pairs"], settings["length"], len(LETTERS))

    def sample(random: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, answers = task.sample(count, random)
        return LETTERS[tokens], torch.where(answers == IGNORE, IGNORE, LETTERS[answers.clamp(min=0)])

    return sample


def base_model(settings: dict[str, Any], seed: int = 0) -> PrismForCausalLM:
    torch.manual_seed(seed)
    pattern = f"gated_delta*{settings['layers']}"
    return PrismForCausalLM(PrismConfig(256, settings["width"], settings["heads"], pattern, use_cache=False))


def trained(model: torch.nn.Module) -> int:
    """The number of parameters that are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def lora(model: Any, rank: int, name: str = "default") -> Any:
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"), adapter_name=name
    )


def nearest_rank(model: Any, parameters: int) -> int:
    """The rank of the PRISM adapter that trains nearest to so many parameters."""
    one, two = (trained(get_peft_model(copy.deepcopy(model), PrismAdapterConfig(rank=r))) for r in (1, 2))
    return max(1, 1 + round((parameters - one) / (two - one)))


def adapted(base: PrismForCausalLM, method: str, rank: int) -> Any:
    """A copy of the base with a method's parameters, about as many as LoRA of this rank has."""
    model = copy.deepcopy(base).requires_grad_(False)
    if method == "base":
        return model
    if method == "lora":
        return lora(model, rank)
    budget = trained(lora(copy.deepcopy(model), rank))
    if method == "prism":
        return get_peft_model(model, PrismAdapterConfig(rank=nearest_rank(base, budget)))
    half = lora(model, rank // 2, "maps")
    rest = nearest_rank(base, budget - trained(half))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(You are trying to modify|Already found)")
        return get_peft_model(half, PrismAdapterConfig(rank=rest), adapter_name="memory")


def loss_of(model: Any, tokens: Tensor, answers: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=IGNORE)


def train(model: Any, sample: Sample, steps: int, rate: float, seed: int, decay: float = 0.7) -> float:
    """Train what is not frozen, with a warm-up, and a decay over a share of the steps; the mean loss of the last tenth."""
    chosen = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(chosen, lr=rate, weight_decay=0.0)
    random, losses = torch.Generator().manual_seed(seed), []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / (0.1 * steps), (steps - step) / (decay * steps))
        loss = loss_of(model, *sample(random))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return statistics.fmean(losses[-max(1, steps // 10) :])


@torch.no_grad()
def nats(model: Any, text: Tensor, settings: dict[str, Any]) -> float:
    """Nats a byte over windows that are spread evenly over a text."""
    context = settings["context"]
    starts = torch.linspace(0, len(text) - context - 1, settings["test_rows"]).long()
    found = [loss_of(model.eval(), *windows(text, some, context)).item() * len(some) for some in starts.split(64)]
    return sum(found) / len(starts)


@torch.no_grad()
def accuracy(model: Any, seed: int, settings: dict[str, Any]) -> float:
    """Share of right answers."""
    tokens, answers = recall(settings, settings["test_rows"])(torch.Generator().manual_seed(seed))
    asked = answers != IGNORE
    right = model.eval()(input_ids=tokens).logits.argmax(-1)[asked] == answers[asked]
    return right.float().mean().item()


class Experiment:
    """Everything that is measured, as lines of results.

    Args:
        first, second: the text of pretraining and that of fine-tuning, by split.
    """

    def __init__(self, settings: dict[str, Any], first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
        self.settings, self.first, self.second = settings, first, second
        self.best: dict[tuple[str, str], dict[str, Any]] = {}

    def lines(self, seeds: list[int], tasks: list[str]) -> Iterator[dict[str, Any]]:
        yield from (self.timed(width) for width in self.settings["timed_widths"])
        for seed in seeds:
            started = time.perf_counter()
            base, s = base_model(self.settings, seed), self.settings
            sample = drawn(self.first["train"], s["context"], s["batch"])
            last = train(base, sample, s["pretraining_steps"], s["pretraining_rate"], seed)
            scores = {
                "first text": nats(base, self.first["test"], s),
                "second text": nats(base, self.second["test"], s),
            }
            result = {"scores": scores, "better": "lower", "metric": "nats a byte", "parameters": trained(base)}
            result |= {"last_loss": last, "seconds": time.perf_counter() - started}
            yield self.line("adapter pretraining", "gated_delta", "pretraining", seed, result)
            for task in tasks:
                for method in METHODS:
                    yield from self.runs(base, task, method, seed, first=seed == seeds[0])

    def runs(self, base: PrismForCausalLM, task: str, method: str, seed: int, first: bool) -> Iterator[dict[str, Any]]:
        """The final run of a method; with the first seed after the tries of all learning rates, of which it is the best."""
        if method == "base":
            yield self.line(task, method, "final", seed, self.measured(base, task, method, seed, None))
            return
        if not first:
            rate = self.best[task, method]["learning_rate"]
            result = self.measured(base, task, method, seed, rate)
            yield self.line(task, method, "final", seed, result, learning_rate=rate)
            return
        tries = []
        for rate in self.settings["learning_rates"]:
            result = self.measured(base, task, method, seed, rate)
            tries.append(self.line(task, method, "search", seed, result, learning_rate=rate))
            yield tries[-1]
        choose = min if TASKS[task][1] == "lower" else max
        best = choose(tries, key=lambda line: line["result"]["validation"])
        self.best[task, method] = best
        yield self.line(task, method, "final", seed, best["result"], learning_rate=best["learning_rate"])

    def measured(self, base: PrismForCausalLM, task: str, method: str, seed: int, rate: float | None) -> dict[str, Any]:
        """Fine-tune once and score."""
        started, s, last = time.perf_counter(), self.settings, math.nan
        torch.manual_seed(seed)
        model, text = adapted(base, method, s["lora_rank"]), task == "adapter text"
        kind = "" if text else "recall_"
        if rate is not None:
            sample = drawn(self.second["train"], s["context"], s["batch"]) if text else recall(s, s["recall_batch"])
            last = train(model, sample, s[kind + "steps"], rate, seed, s[kind + "decay"])
        if text:
            scores = {
                "second text": nats(model, self.second["test"], s),
                "first text": nats(model, self.first["test"], s),
            }
            validation = nats(model, self.second["validation"], s)
        else:
            scores = {"accuracy": accuracy(model, TEST + seed, s)}
            validation = accuracy(model, VALIDATION + seed, s)
        return {
            "scores": scores,
            "validation": validation,
            "better": TASKS[task][1],
            "metric": TASKS[task][0],
            "parameters": sum(p.numel() for p in base.parameters()),
            "trained": trained(model),
            "last_loss": None if math.isnan(last) else last,
            "seconds": time.perf_counter() - started,
        }

    def timed(self, width: int) -> dict[str, Any]:
        """Seconds of a training step of every method, by turns, and the median of their ratios to LoRA's."""
        s = {**self.settings, "width": width}
        models = {method: adapted(base_model(s), method, s["lora_rank"]) for method in METHODS if method != "base"}
        tokens = torch.randint(256, (s["batch"], s["context"] + 1))
        optimizers = {
            m: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]) for m, model in models.items()
        }
        seconds: dict[str, list[float]] = {method: [] for method in models}
        for step in range(s["timed_steps"] + 3):
            for method, model in models.items():
                started = time.perf_counter()
                loss_of(model, tokens[:, :-1], tokens[:, 1:]).backward()
                optimizers[method].step()
                optimizers[method].zero_grad()
                if step > 2:  # the first ones allocate
                    seconds[method].append(time.perf_counter() - started)
        result = {
            "width": width,
            "trained": {method: trained(model) for method, model in models.items()},
            "seconds": {method: statistics.median(found) for method, found in seconds.items()},
            "ratio to lora": {
                method: statistics.median(a / b for a, b in zip(found, seconds["lora"], strict=True))
                for method, found in seconds.items()
            },
        }
        return self.line("adapter step", "all", "speed", 0, result, width=width)

    def line(self, task: str, rule: str, phase: str, seed: int, result: dict[str, Any], **more: Any) -> dict[str, Any]:
        if task == "adapter recall":  # results of several settings are kept apart
            task += f", {self.settings['recall_steps']} × {self.settings['recall_batch']}"
        text = json.dumps([task, rule, phase, seed, self.settings, more], sort_keys=True)
        about = {"key": hashlib.sha256(text.encode()).hexdigest()[:20], "task": task, "rule": rule, "phase": phase}
        return {**about, "seed": seed, **more, "settings": self.settings, "status": "done", "result": result}


def draw(results: Path, picture: Path) -> None:
    """A panel per task: a bar per method, a point per seed."""
    read_lines = [json.loads(text) for text in results.read_text(encoding="utf-8").splitlines()]
    lines = {line["key"]: line for line in read_lines}.values()  # the last line of a training counts
    tasks = sorted({line["task"] for line in lines if line["phase"] == "final"}, reverse=True)
    plt = pyplot()
    figure, panels = plt.subplots(1, len(tasks), figsize=(3.6 * len(tasks), 3.4), layout="constrained", squeeze=False)
    for panel, task in zip(panels[0], tasks, strict=True):
        metric, better = TASKS[task.split(",")[0]]
        for i, method in enumerate(METHODS):
            chosen = [x for x in lines if (x["task"], x["rule"], x["phase"]) == (task, method, "final")]
            values = [next(iter(x["result"]["scores"].values())) for x in chosen]
            found = estimate(values)
            panel.bar(i, found.mean, yerr=found.error, color=COLORS[i], alpha=0.75, capsize=4)
            panel.scatter([i] * len(values), values, color="black", s=8, zorder=3)
        panel.set_xticks(range(len(METHODS)), [NAMES[method].replace(" ", "\n", 1) for method in METHODS], fontsize=8)
        panel.set(
            title=task.removeprefix("adapter ").replace("text", "text of a new domain")
            + (" sequences" if "," in task else "")
        )
        panel.set_ylabel(f"{metric} ({better} is better)")
        panel.spines[["top", "right"]].set_visible(False)
    save(figure, picture)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="*", help="text of pretraining and text of fine-tuning, plain or .xz")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", choices=["text", "recall"], default=["text", "recall"])
    parser.add_argument("--set", nargs="*", default=[], help="settings, such as steps=50")
    parser.add_argument("--draw", action="store_true", help="only draw the picture")
    parser.add_argument("--output", type=Path, default=ROOT / "experiments" / "results" / "adapters.jsonl")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "adapters.png")
    arguments = parser.parse_args()
    changed = {name: json.loads(value) for name, _, value in (word.partition("=") for word in arguments.set)}
    if unknown := changed.keys() - SETTINGS.keys():
        parser.error(f"unknown settings {', '.join(sorted(unknown))}: choose from {', '.join(SETTINGS)}")
    if not arguments.draw:
        if len(arguments.texts) != 2:
            parser.error(f"two texts are needed, for pretraining and for fine-tuning, got {len(arguments.texts)}")
        settings = {**SETTINGS, **changed}
        words = [word if word.startswith("-") else Path(word).name for word in sys.argv[1:]]  # no local folders
        command = shlex.join(["python", "experiments/adapters.py", *words])
        about = {"machine": machine(), "prism": __version__, "command": command}
        experiment = Experiment(settings, *(read(path, settings["megabytes"]) for path in arguments.texts))
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        with arguments.output.open("a", encoding="utf-8") as out:
            for line in experiment.lines(arguments.seeds, [f"adapter {task}" for task in arguments.tasks]):
                out.write(json.dumps({**line, **about}) + "\n")
                out.flush()
                said = [line[name] for name in ("task", "rule", "phase", "seed")]
                print(*said, line.get("learning_rate", ""), json.dumps(line["result"]), flush=True)
    draw(arguments.output, arguments.picture)


if __name__ == "__main__":
    main()
