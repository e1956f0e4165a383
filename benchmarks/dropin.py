"""Time small models of transformers with and without `prism.accelerate`, in one process, in turns.

    python benchmarks/dropin.py                                   # every family; writes benchmarks/results/dropin.json
    python benchmarks/dropin.py --families qwen3_next mamba2 --tokens 1024 --threads 1 --out /tmp/dropin.json
    python benchmarks/dropin.py --busy 1 --families qwen3_next qwen3_5 --out /tmp/busy.json   # beside a busy process
    python benchmarks/dropin.py --out experiments/results/dropin.json && python docs/tools/claims.py   # the page's table

For each family: a forward pass, a forward and backward pass at T = 1024 and 4096, and one token of cached decoding. Batch 1,
float32, four layers (three memory layers and one attention layer where the family mixes them), width 256. "transformers" is
its torch path, also where flash-linear-attention is installed. The two take turns; seconds are medians, and the ratio is the
median of the turns' ratios. Each runs twice in a turn, and the second time counts. Turns in which other processes use the
processor, or neighbours of a rented machine slow it down, are repeated, but for `--busy`.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import prism
from common import paired
from prism.hf.families import FAMILIES, modeling_file
from prism.lab.results import write_results

Timer = Callable[[Callable[[], None], Callable[[], None]], tuple[float, float, float]]
"""Seconds of two candidates, taken in turns, and their ratio."""
VOCABULARY, PROMPT = 512, 64
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}
_MAMBA = {"mamba_d_state": 64, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextForCausalLM", {**_COMMON, **_DELTA, **_EXPERTS}),
    "qwen3_5": ("Qwen3_5ForCausalLM", {**_COMMON, **_DELTA}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {**_COMMON, **_DELTA, **_EXPERTS}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", {**_COMMON, **_DELTA}),
    "mamba2": (
        "Mamba2ForCausalLM",
        {**_COMMON, "state_size": 64, "num_heads": 8, "n_groups": 1, "expand": 2},
    ),
    "bamba": ("BambaForCausalLM", {**_COMMON, **_MAMBA, "attn_layer_indices": [3]}),
    "falcon_h1": ("FalconH1ForCausalLM", {**_COMMON, **_MAMBA, "mamba_d_ssm": 512}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **_COMMON,
            **_MAMBA,
            "layer_types": [*["mamba"] * 3, "attention"],
            "shared_intermediate_size": 512,
            "num_local_experts": 0,
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            **_COMMON,
            "layers_block_type": [*["mamba"] * 3, "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "ssm_state_size": 64,
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            **_COMMON,
            "mamba_d_state": 64,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "mamba_expand": 2,
            "layers_block_type": [*["mamba"] * 3, "hybrid"],
            "num_mem_blocks": 1,
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        {
            **_COMMON,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "xlstm": (
        "xLSTMForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 256,
            "embedding_dim": 256,
            "num_heads": 4,
            "num_blocks": 4,
            "num_hidden_layers": 4,
            "max_inference_chunksize": 1 << 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        {**_COMMON, "lru_width": 256, "block_types": ["recurrent", "recurrent", "recurrent", "attention"]},
    ),
}


def build(name: str) -> Any:
    """A small model of the family, the same for every call."""
    class_name, settings = MODELS[name]
    kind = getattr(import_module(modeling_file(name)), class_name)
    torch.manual_seed(0)
    return kind(kind.config_class(**settings))


def use_torch_functions(name: str) -> None:
    """Let transformers compute this family in torch, whatever packages are installed."""
    file = import_module(modeling_file(name))
    for family in FAMILIES:
        for function in family.functions if name in family.models else ():
            original = getattr(file, function)
            while hasattr(original, "__wrapped__"):
                original = original.__wrapped__
            setattr(file, function, original)


def forward(model: Any, x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            model.eval()(x, use_cache=False)

    return run


def backward(model: Any, x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model.train()(x, labels=x, use_cache=False).loss.backward()

    return run


def decoding(model: Any) -> Callable[[], None]:
    """A function that feeds 16 tokens after a cached prompt, one by one."""
    prompt = torch.randint(2, VOCABULARY, (1, PROMPT))

    def run() -> None:
        model.eval().generate(prompt, max_new_tokens=17, do_sample=False)

    return run


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` cores busy inside the block."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(name: str, lengths: list[int], time: Timer) -> list[dict[str, Any]]:
    use_torch_functions(name)
    theirs, ours = build(name), build(name)
    prism.accelerate(ours, quiet=True)
    rows = []
    for kind, make in (("forward", forward), ("forward and backward", backward)):
        for tokens in lengths:
            x = torch.randint(2, VOCABULARY, (1, tokens))
            rows.append(row(name, kind, tokens, make(theirs, x), make(ours, x), time))
    rows.append(row(name, "decode 16", 1, decoding(theirs), decoding(ours), time))
    prism.restore()
    return rows


def row(
    name: str, kind: str, tokens: int, theirs: Callable[[], None], ours: Callable[[], None], time: Timer
) -> dict[str, Any]:
    prism_s, transformers_s, ratio = time(ours, theirs)
    print(f"{name:18}{kind:22}{tokens:6}{transformers_s:10.4f}{prism_s:10.4f}{ratio:8.3f}", flush=True)
    seconds = {"transformers": transformers_s, "prism": prism_s}
    return {"family": name, "pass": kind, "tokens": tokens, **seconds, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", type=int, default=0, help="processes that keep a core busy meanwhile")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "dropin.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'family':18}{'pass':22}{'tokens':>6}{'theirs s':>10}{'ours s':>10}{'ratio':>8}")
    time = partial(paired, repeats=options.repeats, alone=not options.busy)
    rows: list[dict[str, Any]] = []
    about = {"command": shlex.join(["python", *sys.argv]), "threads": options.threads, "busy": options.busy}
    about["repeats"] = options.repeats
    about["transformers"] = import_module("transformers").__version__
    with busy_processes(options.busy):
        for name in options.families:
            rows += measure(name, options.tokens, time)
            write_results(options.out, rows, **about)


if __name__ == "__main__":
    main()
