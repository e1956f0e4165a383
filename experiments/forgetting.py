"""Simulate how an error in every write accumulates in a memory that forgets, and in one that does not.

    python experiments/forgetting.py            # experiments/results/forgetting.json, docs/images/forgetting.png

A memory is linear in its writes, so the error E_t (the state with errors minus the state without) obeys the same recurrence:

    E_t = α_t (I - β_t k_t k_tᵀ) E_{t-1} + c_t ε_tᵀ          ‖k_t‖ = ‖c_t‖ = 1,  E‖ε_t‖² = 1

The paper (Lemma D.1, Theorem D.3) says that E stays bounded if the transition never grows, where a memory without
forgetting diverges. With α < 1 the bound is ‖E‖ ≤ 1 / (1 - α), and 1 / √(1 - α²) in mean square for independent errors.
The *growth* of a case is the slope of log ‖E_t‖ against log t over the last four octaves: 0 is bounded, ½ a random walk,
1 proportional to the length. A case that overflows or grows by more than t² diverges.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prism.lab.results import COLORS, pyplot, save, write_results

ROOT = Path(__file__).parents[1]
KEY_DIM, VALUE_DIM = 64, 16


@dataclass(frozen=True)
class Case:
    """One memory and one kind of error.

    Args:
        decay: α.
        erase: the distribution of β: `"none"`, `"sigmoid"` (uniform in 0..1) or `"linear"` (normal, without a bound).
        error_key: c: `"erased"` is k itself, `"own"` another key, `"outside"` one orthogonal to all k.
        biased: whether ε is the same at every token, along keys that share a direction, rather than independent.
    """

    name: str
    decay: float
    erase: str
    error_key: str = "own"
    biased: bool = False


CASES = (
    Case("no forgetting", 1.0, "none"),
    Case("no forgetting, biased error", 1.0, "none", biased=True),
    Case("erase alone, error along the erased key", 1.0, "sigmoid", "erased"),
    Case("erase alone, error along its own key", 1.0, "sigmoid"),
    Case("erase alone, key that is never erased", 1.0, "sigmoid", "outside"),
    Case("PRISM, α = .99", 0.99, "sigmoid"),
    Case("PRISM, α = .99, biased error", 0.99, "sigmoid", biased=True),
    Case("PRISM, α = .99, key that is never erased", 0.99, "sigmoid", "outside"),
    Case("PRISM, α = .999", 0.999, "sigmoid"),
    Case("α = .999, β linear as in Eq. 11", 0.999, "linear"),
)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def inputs(case: Case, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys k `[T, K]`, strengths β `[T]`, error keys c `[T, K]` and errors ε `[T, V]`, in float64."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    k, c, shared = normal(tokens, KEY_DIM), normal(tokens, KEY_DIM), normal(KEY_DIM)
    uniform, linear = torch.rand(tokens, generator=random, dtype=torch.float64), normal(tokens)
    errors = normal(tokens, VALUE_DIM) / math.sqrt(VALUE_DIM)
    if case.biased:
        k, c, errors = k + shared, c + shared, unit(errors[:1]).expand(tokens, -1)
    if case.error_key == "outside":
        k[:, KEY_DIM // 2 :] = 0
        c[:, : KEY_DIM // 2] = 0
    k, c = unit(k), unit(c)
    beta = {"none": torch.zeros_like(uniform), "sigmoid": uniform, "linear": linear}[case.erase]
    return k, beta, k if case.error_key == "erased" else c, errors


def simulate(cases: tuple[Case, ...], tokens: int, seeds: int, at: list[int]) -> Tensor:
    """‖E_t‖ (Frobenius) after the numbers of tokens `at`: `[cases, seeds, len(at)]`."""
    drawn = [[inputs(case, tokens, seed) for seed in range(seeds)] for case in cases]
    k, beta, c, errors = (
        torch.stack([torch.stack([run[i] for run in runs]) for runs in drawn]) for i in range(4)
    )  # [cases, seeds, T, …]
    decay = torch.tensor([case.decay for case in cases], dtype=torch.float64).view(-1, 1, 1, 1)
    E = torch.zeros(len(cases), seeds, KEY_DIM, VALUE_DIM, dtype=torch.float64)
    norms = []
    for t in range(tokens):
        key = k[:, :, t, :, None]
        E = decay * (E - beta[:, :, t, None, None] * key * (key * E).sum(2, keepdim=True))
        E = E + c[:, :, t, :, None] * errors[:, :, t, None, :]
        if t + 1 in at:
            norms.append(E.flatten(2).norm(dim=-1))
    return torch.stack(norms, -1)


def growth(norms: Tensor, at: list[int]) -> Tensor:
    """Slope of log ‖E‖ against log t over the last five points of each seed, `[seeds]`; infinite after an overflow."""
    y, x = norms[:, -5:].log(), torch.tensor(at[-5:], dtype=torch.float64).log()
    x = x - x.mean()
    return torch.where(y.isfinite().all(-1), (y * x).sum(-1) / (x * x).sum(), math.inf)


def summarise(case: Case, norms: Tensor, at: list[int]) -> dict[str, Any]:
    slope = growth(norms, at)
    diverges = not bool(torch.isfinite(slope).all()) or slope.mean().item() > 2
    bound = None
    if case.decay < 1 and case.erase != "linear":
        bound = 1 / (1 - case.decay) if case.biased else 1 / math.sqrt(1 - case.decay**2)
    return {
        "case": case.name,
        "decay": case.decay,
        "erase": case.erase,
        "error_key": case.error_key,
        "biased": case.biased,
        "diverges": diverges,
        "growth": None if diverges else slope.tolist(),
        "norm": [[value if math.isfinite(value) else None for value in seed] for seed in norms.tolist()],
        "bound": bound,
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """A line per case, mean over seeds."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for row, color in zip(results["cases"], COLORS, strict=True):
        curves = [[value or math.inf for value in seed] for seed in row["norm"]]
        mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        style = "-" if row["decay"] < 1 else "--"
        axes.plot(results["tokens"], mean, style, color=color, marker="o", ms=3, label=row["case"])
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="‖error of the state‖", ylim=(0.5, 3e4))
    axes.set_title("One unit of error per write: what accumulates")
    axes.legend(fontsize=7, frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="length; a power of two")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "experiments" / "results" / "forgetting.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "images" / "forgetting.png")
    arguments = parser.parse_args()
    at = [2**n for n in range(int(math.log2(arguments.tokens)) + 1)]
    norms = simulate(CASES, at[-1], arguments.seeds, at)
    rows = [summarise(case, norms[i], at) for i, case in enumerate(CASES)]
    results = {"tokens": at, "key_dim": KEY_DIM, "value_dim": VALUE_DIM, "seeds": arguments.seeds, "cases": rows}
    command = shlex.join(["python", "experiments/forgetting.py", *sys.argv[1:]])
    print("written to", write_results(arguments.output, results, command=command))
    draw(results, arguments.picture)
    for row in rows:
        grown = "diverges" if row["diverges"] else f"{sum(row['growth']) / len(row['growth']):+.3f}"
        print(f"{row['case']:<44} {grown:>9}  {row['norm'][0][-1]}  bound {row['bound']}")


if __name__ == "__main__":
    main()
