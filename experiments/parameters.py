"""Count the parameters that L writes add to Gated DeltaNet, for the sizes of `prism train lm`.

    python experiments/parameters.py            # experiments/results/parameters.json

Two figures per size: of the layer that mixes tokens alone, and of the whole language model (GPT-2's vocabulary, tied
embeddings). Nothing is trained or allocated: the models are built on the meta device. Both presets of PRISM are counted;
`paper` also against its own L = 1, because it lacks Gated DeltaNet's output gate and has other maps.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prism.lab.results import write_results
from prism.language.model import build_model
from prism.language.settings import PRESETS, ModelSettings

VOCABULARY = 50_304
STEPS = (1, 2, 3, 4)
SIZES = ("30m", "130m", "340m", "1.3b")


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def counts(model: ModelSettings, rule: str, *options: str) -> dict[str, int]:
    """Parameters of one mixer and of the whole model."""
    with torch.device("meta"):
        built: Any = build_model(replace(model, layers=rule, options=options), VOCABULARY, 0)
    mixers = [module for name, module in built.named_modules() if name.endswith(".mixer")]
    assert len(mixers) == model.num_hidden_layers
    return {"mixer": count(mixers[0]), "model": count(built)}


def measure(size: str) -> list[dict[str, Any]]:
    """A row per model of a size, with the overhead over Gated DeltaNet in both figures."""
    model = PRESETS[size]().model
    base = counts(model, "gated_delta")
    rows = [{"size": size, "rule": "gated_delta", **base}]
    for preset in ("lm", "paper"):
        own = counts(model, "prism", f"prism.preset={preset}", "prism.steps=1")
        for steps in STEPS:
            found = counts(model, "prism", f"prism.preset={preset}", f"prism.steps={steps}")
            over = {
                f"{what}_over_{name}": found[what] / other[what] - 1
                for name, other in (("gated_delta", base), ("rank_1", own))
                for what in found
            }
            rows.append({"size": size, "rule": "prism", "preset": preset, "steps": steps, **found, **over})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(PRESETS))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "parameters.json")
    arguments = parser.parse_args()
    rows = [row for size in arguments.sizes for row in measure(size)]
    command = shlex.join(["python", "experiments/parameters.py", *sys.argv[1:]])
    print("written to", write_results(arguments.output, rows, command=command))
    for row in rows:
        over = "".join(f"  {row.get(f'{what}_over_gated_delta', 0):+7.1%}" for what in ("mixer", "model"))
        rank = f"{row['preset']} L={row['steps']}" if "preset" in row else ""
        print(f"{row['size']:5} {row['rule']:12} {rank:10} {row['mixer']:>12,} {row['model']:>14,}{over}")


if __name__ == "__main__":
    main()
