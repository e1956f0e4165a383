"""Measure one more token after 100 and after 10,000 tokens: bytes of state and seconds per step, for stacks of every rule.

    python benchmarks/generation.py         # four layers each; writes benchmarks/results/generation.json

Width 256, 4 heads, batch 1, float32. The two contexts take turns; figures are the median of many steps. Stacks whose state
has a constant size must show the same bytes and the same time for both; softmax attention shows what growth looks like.
Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from prism import rules
from prism.models import PrismCache, PrismConfig, PrismForCausalLM
from prism.reports.results import write_results

CONTEXTS = (100, 10_000)


@torch.inference_mode()
def contexts(model: PrismForCausalLM, size: int = 2_000) -> dict[int, PrismCache]:
    """Caches that have read so many tokens, `size` at a time to keep attention's score matrices small."""
    caches = {}
    for tokens in CONTEXTS:
        cache = PrismCache()
        for part in torch.randint(0, model.config.vocab_size, (1, tokens)).split(size, 1):
            model(part, past_key_values=cache, logits_to_keep=1)
        caches[tokens] = cache
    return caches


@torch.inference_mode()
def step_seconds(model: PrismForCausalLM, caches: dict[int, PrismCache], steps: int) -> dict[int, float]:
    token, seconds = torch.zeros(1, 1, dtype=torch.long), {tokens: [] for tokens in caches}
    for _ in range(steps):
        for tokens, cache in caches.items():
            copied = cache.copy()  # every step is timed from the same context
            start = time.perf_counter()
            model(token, past_key_values=copied)
            seconds[tokens].append(time.perf_counter() - start)
    return {tokens: statistics.median(values) for tokens, values in seconds.items()}


def measure(rule: str, steps: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = PrismForCausalLM(PrismConfig(256, 256, 4, rule, 4)).eval()
    caches = contexts(model)
    step_seconds(model, caches, 3)
    seconds = step_seconds(model, caches, steps)
    short, long = CONTEXTS
    return {
        "rule": rule,
        "constant_state": model.config.constant_state,
        "bytes": {tokens: cache.nbytes for tokens, cache in caches.items()},
        "seconds": seconds,
        "slower": seconds[long] / seconds[short],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="*", default=list(rules.names()))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "generation.json")
    arguments = parser.parse_args()
    rows = []
    for rule in arguments.rules:
        row = measure(rule, arguments.steps)
        rows.append(row)
        sizes = " → ".join(f"{size / 2**20:.2f} MiB" for size in row["bytes"].values())
        print(f"{rule:>16}  {sizes:<24}  {row['seconds'][CONTEXTS[0]] * 1e3:.2f} ms  × {row['slower']:.2f}", flush=True)
    print("written to", write_results(arguments.output, rows, command="python benchmarks/generation.py"))


if __name__ == "__main__":
    main()
