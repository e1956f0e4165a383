"""Test whether a layer of attention among memory layers restores recall that the memory alone has no room for.

    python experiments/hybrid.py            # experiments/results/hybrid.jsonl: one line per model and seed

Associative recall (`prism.lab.tasks.mqar`) with more pairs than a memory of this size can hold. Stacks of two layers of equal
width: memory alone (PRISM, Gated DeltaNet), PRISM below attention, and attention alone. All
have a short convolution of width 4 in every layer. They train on one number of pairs and length; the test has that and
longer sequences with as many pairs, whose questions are further away. One layer with its convolution suffices for recall
in principle; the second gives the hybrid its attention.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism import __version__
from prism.device import pick_device
from prism.lab.results import machine
from prism.lab.tasks.mqar import Recall
from prism.lab.tasks.task import IGNORE, stream
from prism.nn import Mixer
from prism.rules.parts import ShortConv
from prism.rules.rule import Span

STACKS = ("prism+prism", "gated_delta+gated_delta", "prism+softmax", "softmax+softmax")
SETTINGS: dict[str, Any] = {
    "pairs": 64,
    "length": 256,
    "vocabulary": 512,
    "width": 64,
    "key_dim": 16,
    "steps": 2000,
    "batch": 64,
    "learning_rate": 3e-3,
    "test_sequences": 512,
    "stretch": [1, 2, 4],
    "timescales": [1.0, 1024.0],
    "gate_by": "sigmoid",
}
"""Decays and gate are those of the default `prism`, also for Gated DeltaNet."""


class Stack(nn.Module):
    """Layers of norm → short convolution (the same for every rule) → mixer, without SwiGLUs: the mixers are compared."""

    def __init__(self, stack: str, settings: dict[str, Any]) -> None:
        super().__init__()
        width = settings["width"]
        sizes = {name: settings[name] for name in ("key_dim", "timescales", "gate_by")} | {
            "value_dim": width,
            "conv_size": 1,
        }
        self.embedding = nn.Embedding(settings["vocabulary"], width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.norms, self.convolutions, self.mixers = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for rule in stack.split("+"):
            options = {} if rule == "softmax" else sizes
            self.norms.append(nn.RMSNorm(width))
            self.convolutions.append(ShortConv(width))
            self.mixers.append(Mixer(rule, width, 1, **options))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, settings["vocabulary"], bias=False)

    def forward(self, tokens: Tensor, asked: Tensor) -> Tensor:
        """Logits at the places that are asked."""
        x = self.embedding(tokens)
        for norm, convolution, mixer in zip(self.norms, self.convolutions, self.mixers, strict=True):
            x = x + mixer(convolution(norm(x), None, Span())[0])[0]
        return self.head(self.norm(x[asked]))


def train(stack: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one stack with one seed and test it at every length."""
    started = time.perf_counter()
    torch.manual_seed(seed)
    device = pick_device("auto")
    model = Stack(stack, settings).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"], weight_decay=0.0)
    random, steps = torch.Generator().manual_seed(seed), settings["steps"]
    task = Recall(pairs=settings["pairs"], length=settings["length"], vocabulary=settings["vocabulary"])
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * min(1.0, (step + 1) / 100, (steps - step) / (0.5 * steps))
        tokens, answers = (part.to(device) for part in task.sample(settings["batch"], random))
        asked = answers != IGNORE
        loss = F.cross_entropy(model(tokens, asked), answers[asked])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    scores = {}
    random = stream("test", seed)
    for stretch in settings["stretch"]:
        length = stretch * settings["length"]
        longer = Recall(pairs=settings["pairs"], length=length, vocabulary=settings["vocabulary"])
        scores[f"length {longer.length}"] = accuracy(model.eval(), longer, settings["test_sequences"], random)
    return {
        "scores": scores,
        "validation": None,
        "better": "higher",
        "metric": "accuracy",
        "parameters": sum(p.numel() for p in model.parameters()),
        "last_loss": loss.item(),
        "seconds": time.perf_counter() - started,
    }


@torch.no_grad()
def accuracy(model: Any, task: Recall, count: int, random: torch.Generator) -> float:
    """Share of right answers over `count` sequences."""
    right = asked = 0
    device = next(model.parameters()).device
    for _ in range(0, count, 64):
        tokens, answers = (part.to(device) for part in task.sample(64, random))
        here = answers != IGNORE
        found = model(tokens, here).argmax(-1)
        right, asked = right + int((found == answers[here]).sum()), asked + len(found)
    return right / asked


def one(job: tuple[str, int, dict[str, Any]]) -> dict[str, Any]:
    """The line of a run, also of one that failed."""
    stack, seed, settings = job
    torch.set_num_threads(1)
    text = json.dumps([stack, seed, settings], sort_keys=True)
    line = {"key": hashlib.sha256(text.encode()).hexdigest()[:20], "task": "hybrid recall", "rule": stack}
    line |= {"phase": "final", "seed": seed, "settings": settings}
    try:
        return {**line, "status": "done", "result": train(stack, seed, settings)}
    except Exception as error:  # a failed run is a result
        return {**line, "status": "failed", "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", nargs="+", default=list(STACKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--set", nargs="*", default=[], help="settings, such as steps=500")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "hybrid.jsonl")
    arguments = parser.parse_args()
    changed = {name: json.loads(value) for name, _, value in (word.partition("=") for word in arguments.set)}
    if unknown := changed.keys() - SETTINGS.keys():
        parser.error(f"unknown settings {', '.join(sorted(unknown))}: choose from {', '.join(SETTINGS)}")
    command = shlex.join(["python", "experiments/hybrid.py", *sys.argv[1:]])
    provenance = {"machine": machine(), "prism": __version__, "command": command}
    jobs = [(stack, seed, {**SETTINGS, **changed}) for seed in arguments.seeds for stack in arguments.stacks]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with arguments.output.open("a", encoding="utf-8") as out, context.Pool(arguments.jobs) as pool:
        for line in pool.imap_unordered(one, jobs):
            out.write(json.dumps({**line, **provenance}) + "\n")
            out.flush()
            print(line["rule"], line["seed"], line["status"], line.get("result", line.get("error")), flush=True)


if __name__ == "__main__":
    main()
