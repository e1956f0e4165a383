"""Time a Gated DeltaNet layer of Qwen3.5 on a GPU, with and without `prism.accelerate`, in one process, in turns.

    python benchmarks/dropin_gpu.py                                # all heads; writes benchmarks/results/dropin_gpu.json
    python benchmarks/dropin_gpu.py --heads 16/32 --shapes 1x8192 --profile
    python benchmarks/dropin_gpu.py --tiny --device cpu            # a smoke test without a GPU

"transformers" is the layer as it is, with flash-linear-attention if that is installed (a line says which function computes the
memory). Weights and activations are bfloat16, heads 128 wide. Before a shape is timed, the outputs and the gradients of the
inputs of both are compared with transformers' torch functions in float32: an error above twice that of transformers is
printed as WRONG and makes the exit status 1. Milliseconds are medians; rounds alternate between the two.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import prism
from dropin import use_torch_functions
from prism.hf.families import modeling_file
from prism.lab.results import write_results

FAMILY, LAYER, RULE = "qwen3_5", "Qwen3_5GatedDeltaNet", "torch_chunk_gated_delta_rule"
HIDDEN = {"16/16": 2048, "16/32": 4096, "16/48": 5120, "16/64": 4096}
"""Heads of keys and of values → width of the Qwen3.5 models that have them."""
PASSES = ("forward", "forward and backward")


def build(heads: str, device: str, tiny: bool) -> Any:
    """The layer with random weights in bfloat16 (float32 on a CPU)."""
    file = import_module(modeling_file(FAMILY))
    keys, values = (int(n) // (8 if tiny else 1) for n in heads.split("/"))
    width = 16 if tiny else 128
    config = file.Qwen3_5TextConfig(
        hidden_size=64 if tiny else HIDDEN.get(heads, 4096),
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    torch.manual_seed(0)
    layer = getattr(file, LAYER)(config, 0)
    return layer.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def memory_function() -> str:
    """The function by which transformers computes the memory here."""
    function = getattr(import_module(modeling_file(FAMILY)), RULE)
    while function is not None:
        found = inspect.getclosurevars(function).nonlocals.get("implementation")
        if found is not None:
            return f"{found.__module__}.{found.__name__}"
        function = getattr(function, "__wrapped__", None)
    return RULE


def plain_functions(layer: Any) -> Any:
    """A copy of the layer in float32 that computes with transformers' torch functions."""
    exact, file = copy.deepcopy(layer).float(), import_module(modeling_file(FAMILY))
    unwrapped = {name: inspect.unwrap(getattr(file, name)) for name in (RULE, "causal_conv1d_fn")}
    forward = inspect.unwrap(type(exact).forward)
    scope = {**forward.__globals__, **unwrapped}
    plain = type(forward)(forward.__code__, scope, "forward", forward.__defaults__, forward.__closure__)
    plain.__kwdefaults__ = forward.__kwdefaults__
    exact.forward = plain.__get__(exact)
    return exact


def differentiate(layer: Any, x: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of the input."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return y.detach(), torch.autograd.grad(y, x, d_y.to(y))[0]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def check(theirs: Any, ours: Any, x: Tensor) -> dict[str, Any]:
    """Errors of both against float32, over the first 1,024 tokens of one row."""
    x = x[:1, :1024]
    d_y = torch.randn_like(x)
    wanted = differentiate(plain_functions(theirs), x.float(), d_y.float())
    errors = {
        name: [error(a, b) for a, b in zip(differentiate(layer, x, d_y), wanted, strict=True)]
        for name, layer in (("transformers", theirs), ("prism", ours))
    }
    limits = [max(2 * each, 1e-5) for each in errors["transformers"]]
    good = all(a <= b for a, b in zip(errors["prism"], limits, strict=True))
    return {"errors": errors, "good": good}


def passes(layer: Any, x: Tensor, d_y: Tensor) -> dict[str, Callable[[], Any]]:
    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x).backward(d_y)

    return dict(zip(PASSES, (forward, both), strict=True))


def milliseconds(run: Callable[[], Any], device: str, tiny: bool) -> float:
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(run, warmup=25, rep=100, return_mode="median")
    times = []
    for _ in range(1 if tiny else 5):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def measure(heads: str, batch: int, tokens: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    theirs = build(heads, options.device, options.tiny)
    ours = copy.deepcopy(theirs)
    prism.accelerate(ours, quiet=True)
    draw = {"device": options.device, "dtype": theirs.out_proj.weight.dtype}
    x = torch.randn(batch, tokens, theirs.hidden_size, **draw).requires_grad_()
    d_y = torch.randn_like(x)
    start = time.perf_counter()
    checked = check(theirs, ours, x)
    runs = {"transformers": passes(theirs, x, d_y), "prism": passes(ours, x, d_y)}
    for each in runs.values():
        each[PASSES[1]]()
    print(f"  checked, compiled and tuned in {time.perf_counter() - start:.0f} s", flush=True)
    if options.profile:
        for name, each in runs.items():
            profile(name, each[PASSES[1]], options.device)
    for kind in PASSES:
        rounds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, each in runs.items():
                rounds[name].append(milliseconds(each[kind], options.device, options.tiny))
        found = {name: median(times) for name, times in rounds.items()}
        row = {"heads": heads, "batch": batch, "tokens": tokens, "pass": kind, **found}
        yield {**row, "ratio": found["prism"] / found["transformers"], "rounds": rounds, **checked}


def profile(name: str, run: Callable[[], Any], device: str) -> None:
    """Print the kernels that take longest in three runs."""
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if device == "cuda" else [kinds.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(3):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
    key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    kernels = [event for event in seen.key_averages() if device != "cuda" or str(event.device_type).endswith("CUDA")]
    kernels.sort(key=lambda event: -getattr(event, key))
    total = sum(getattr(event, key) for event in kernels)
    print(f"  {name}: {total / 3e3:.2f} ms of kernels a pass, forward and backward")
    for event in kernels[:24]:
        print(f"    {getattr(event, key) / 3e3:8.3f} ms {event.count // 3:4} × {event.key[:100]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=list(HIDDEN), help="heads of keys/heads of values")
    parser.add_argument("--shapes", nargs="+", default=["1x8192", "4x4096"], help="batch x tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further shape is begun")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--profile", action="store_true", help="also list the kernels that take longest")
    parser.add_argument("--tiny", action="store_true", help="2 to 8 heads 16 wide, 64 tokens, one round")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "dropin_gpu.json")
    options = parser.parse_args()
    if options.tiny:
        options.shapes, options.rounds = ["2x64"], 1
    if options.device == "cuda":
        torch.set_float32_matmul_precision("highest")
        if find_spec("fla") is not None:
            from peer_model import prepare_fla

            prepare_fla()
    else:
        use_torch_functions(FAMILY)
    print(f"transformers computes the memory by {memory_function()}", flush=True)
    began, rows = time.monotonic(), []
    for heads in options.heads:
        for batch, tokens in ([int(n) for n in shape.split("x")] for shape in options.shapes):
            if time.monotonic() - began > options.budget:
                print(f"{heads} {batch}x{tokens}: not begun, the budget of {options.budget:.0f} s is spent")
                continue
            for row in measure(heads, batch, tokens, options):
                rows.append(row)
                verdict = "" if row["good"] else "  WRONG: " + str(row["errors"])
                print(
                    f"{heads:6} {batch:2} × {tokens:<6} {row['pass']:22}{row['transformers']:9.3f} ms"
                    f"{row['prism']:9.3f} ms{row['ratio']:7.2f}{verdict}",
                    flush=True,
                )
            about = {"command": shlex.join(["python", *sys.argv]), "memory": memory_function()}
            write_results(options.out, rows, **about, transformers=import_module("transformers").__version__)
            if options.device == "cuda":
                torch.cuda.empty_cache()
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
