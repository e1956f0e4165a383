"""Measure the rank of what PRISM writes at one token: Σ_l k_l w_lᵀ, for L = 1 … 4.

    python experiments/write_rank.py                              # random weights: experiments/results/write_rank.json
    python experiments/write_rank.py --text novels.txt            # and after training a small language model

*Rank* is the number of singular values above 10⁻⁹ of the largest, in float64: what the paper's theorem is about. *Effective
rank* is (Σσ²)² / Σσ⁴, which is L if all L parts are orthogonal and equally large, and near 1 if one of them dominates.
Both are means over tokens, heads and layers.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from anchor_error import read_bytes, sequences, train
from torch import Tensor

from prism.lab.results import write_results
from prism.nn import Mixer
from prism.nn.mixer import Span

RANKS = (1, 2, 3, 4)


@torch.no_grad()
def ranks(rule: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rank and effective rank of every token's write, `[N]` each."""
    update, _, _ = rule.update(x, {}, Span())
    written = torch.einsum("bthlk,bthlv->bthkv", update.k.double(), update.w.double())
    sigma = torch.linalg.svdvals(written).flatten(0, 2)
    squared = sigma.square()
    effective = squared.sum(-1).square() / squared.square().sum(-1)
    return (sigma > 1e-9 * sigma[:, :1]).sum(-1).double(), effective


def untrained(seed: int) -> list[dict[str, Any]]:
    """Both presets with random weights, with own keys and with a shared one."""
    rows = []
    for preset in ("lm", "paper"):
        for shared in (False, True):
            for L in RANKS:
                torch.manual_seed(seed)
                mixer = Mixer("prism", 64, 2, preset=preset, steps=L, shared_key=shared).double()
                rank, effective = ranks(mixer.rule, torch.randn(1, 64, 64, dtype=torch.float64))
                about = {"weights": "random", "preset": preset, "shared_key": shared, "L": L, "seed": seed}
                rows.append(
                    {**about, "rank": [rank.min().item(), rank.max().item()], "effective": effective.mean().item()}
                )
    return rows


@torch.no_grad()
def trained(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks over all layers of a language model."""
    found: list[tuple[Tensor, Tensor]] = []
    mixers = [module for name, module in model.named_modules() if name.endswith(".mixer")]
    hooks = [m.register_forward_pre_hook(lambda m, args: found.append(ranks(m.rule, args[0]))) for m in mixers]
    model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    rank, effective = zip(*found, strict=True)
    return torch.cat(rank), torch.cat(effective)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="also measure small language models trained on this text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "write_rank.json")
    arguments = parser.parse_args()
    words = [arguments.text.name if word == str(arguments.text) else word for word in sys.argv[1:]]
    command = shlex.join(["python", "experiments/write_rank.py", *words])
    rows = [row for seed in arguments.seeds for row in untrained(seed)]
    if arguments.text is not None:
        text = read_bytes(arguments.text)
        settings = argparse.Namespace(width=64, layers=2, lr=3e-3, steps=arguments.steps, batch=8, context=128)
        cut = int(0.9 * len(text))
        tokens = sequences(text[cut:], 8, 128, torch.Generator().manual_seed(10_000))
        for seed in arguments.seeds:
            for L in RANKS[1:]:
                model, loss = train(text[:cut], 4, seed, settings, rank=L)
                rank, effective = trained(model, tokens)
                row = {
                    "weights": "trained",
                    "preset": "lm",
                    "shared_key": False,
                    "L": L,
                    "seed": seed,
                    "train_loss": loss,
                }
                rows.append(
                    {**row, "rank": [rank.min().item(), rank.max().item()], "effective": effective.mean().item()}
                )
                write_results(arguments.output, rows, command=command)
                print(rows[-1], flush=True)
    print("written to", write_results(arguments.output, rows, command=command))
    for row in rows:
        print(row["weights"], row["preset"], row["shared_key"], row["L"], row["rank"], round(row["effective"], 3))


if __name__ == "__main__":
    main()
