"""Measure generation on a CPU: tokens per second against a Transformer, and steps after short and long texts.

    python benchmarks/generation.py         # both tables; writes benchmarks/results/generation.json

Two tables, float32, batch 1.

- `llama`: tokens per second of PRISM over transformers' Llama with as many parameters, after 256 and 4,096 tokens of context,
  for models of 1 M and 30 M parameters, on one thread. Both generate greedily, token by token, each with its own cache and
  `model(token, past_key_values=cache)`, in one process; the two take turns and the fastest of many turns counts, because other
  programs on the machine only ever make a turn slower. Time is that of the process on a processor. `ordinary` is PRISM's
  forward pass of one token.
- `rules`: bytes of state and seconds of a token after 100 and after 10,000 tokens, for stacks of every rule (four
  layers, width 256, 4 heads). The two contexts take turns; figures are the median. Stacks whose state has a constant size must
  show the same bytes and the same time for both; softmax attention shows what growth looks like.

Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from prism import rules
from prism.lab.results import write_results
from prism.models import PrismCache, PrismConfig, PrismForCausalLM

CONTEXTS = (100, 10_000)
LLAMA_CONTEXTS = (256, 4_096)
SIZES = {"1M": (4_096, 128, 3, 2), "30M": (32_768, 384, 10, 3)}
"""Vocabulary, width, layers and heads (of 64 and of 128 channels) of PRISM: the presets `tiny` and `30m`."""


@torch.inference_mode()
def read(model: Any, cache: Any, tokens: int, size: int = 1_024) -> Any:
    """The cache after so many random tokens, `size` at a time to keep attention's score matrices small."""
    for part in torch.randint(0, model.config.vocab_size, (1, tokens)).split(size, 1):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def of_size(name: str) -> tuple[PrismForCausalLM, LlamaForCausalLM]:
    """PRISM and a Llama of the same vocabulary, width and depth; the Llama's SwiGLU is as wide as gives equal parameters."""
    vocabulary, width, layers, heads = SIZES[name]
    head = {"key_dim": width // heads, "value_dim": width // heads}
    torch.manual_seed(0)
    ours = PrismForCausalLM(PrismConfig(vocabulary, width, heads, "prism", layers, rule_options={"prism": head}))
    wanted = sum(p.numel() for p in ours.parameters())
    rest = wanted - vocabulary * width - layers * (4 * width**2 + 2 * width) - width
    settings = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers}
    llama = LlamaForCausalLM(
        LlamaConfig(
            **settings,
            intermediate_size=round(rest / (3 * width * layers)),
            num_attention_heads=width // 64,
            max_position_embeddings=8_192,
            tie_word_embeddings=True,
        )
    )
    return ours.eval(), llama.eval()


def by_model(model: Any, cache: Any) -> Callable[[Tensor], Tensor]:
    """The next token `[1]` by the model's own forward pass."""

    def following(token: Tensor) -> Tensor:
        return model(token[:, None], past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)

    return following


def by_forward(model: PrismForCausalLM, cache: PrismCache) -> Callable[[Tensor], Tensor]:
    """The next token `[1]` as a sequence of one token."""

    def following(token: Tensor) -> Tensor:
        backbone = model.model
        x, states = backbone.embed_tokens(token[:, None]), []
        for layer, state in zip(backbone.layers, cache.states, strict=True):
            x, state = layer(x, state, shared={})
            states.append(state)
        cache.states = states
        return model.lm_head(backbone.norm(x))[:, -1].argmax(-1)

    return following


@torch.inference_mode()
def seconds_per_token(ways: dict[str, Callable[[Tensor], Tensor]], turns: int, tokens: int) -> dict[str, float]:
    """The fastest of many turns of a few tokens each; the ways take turns."""
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(turns + 1):
        for name, following in ways.items():
            token = torch.zeros(1, dtype=torch.long)
            start = time.process_time()
            for _ in range(tokens):
                token = following(token)
            if turn:  # the first one merges weights, and fills caches
                best[name] = min(best[name], (time.process_time() - start) / tokens)
    return best


def against_llama(size: str, context: int, turns: int, tokens: int) -> dict[str, object]:
    ours, llama = of_size(size)
    ways = {
        "prism": by_model(ours, read(ours, PrismCache(), context)),
        "ordinary": by_forward(ours, read(ours, PrismCache(), context)),
        "llama": by_model(llama, read(llama, DynamicCache(config=llama.config), context)),
    }
    seconds = seconds_per_token(ways, turns, tokens)
    return {
        "size": size,
        "parameters": {"prism": ours.num_parameters(), "llama": llama.num_parameters()},
        "context": context,
        "tokens_per_second": {name: 1 / value for name, value in seconds.items()},
        "over_llama": seconds["llama"] / seconds["prism"],
        "over_ordinary": seconds["ordinary"] / seconds["prism"],
    }


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


def short_and_long(rule: str, steps: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = PrismForCausalLM(PrismConfig(256, 256, 4, rule, 4)).eval()
    caches = {tokens: read(model, PrismCache(), tokens) for tokens in CONTEXTS}
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
    parser.add_argument("--tables", nargs="*", choices=["llama", "rules"], default=["llama", "rules"])
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rules", nargs="*", default=list(rules.names()))
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each rule")
    parser.add_argument("--turns", type=int, default=20, help="turns of each way against Llama")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a turn")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "generation.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    if "llama" in arguments.tables:
        for size in arguments.sizes:
            for context in LLAMA_CONTEXTS:
                row = against_llama(size, context, arguments.turns, arguments.tokens)
                rows.append(row)
                rates = "  ".join(f"{name} {rate:,.0f}/s" for name, rate in row["tokens_per_second"].items())
                ratios = f"{row['over_llama']:.2f} × Llama  {row['over_ordinary']:.1f} × ordinary"
                print(f"{size:>4} after {context:>5,}  {rates}  {ratios}", flush=True)
    for rule in arguments.rules if "rules" in arguments.tables else ():
        row = short_and_long(rule, arguments.steps)
        rows.append(row)
        sizes = " → ".join(f"{size / 2**20:.2f} MiB" for size in row["bytes"].values())
        print(f"{rule:>16}  {sizes:<24}  {row['seconds'][CONTEXTS[0]] * 1e3:.2f} ms  × {row['slower']:.2f}", flush=True)
    print("written to", write_results(arguments.output, rows, command=shlex.join(["python", *sys.argv])))


if __name__ == "__main__":
    main()
