"""Time how long `torch.compile` takes for a small language model on the CPU, with all caches off.

    python benchmarks/compile_time.py                     # forward and backward of two PRISM layers
    python benchmarks/compile_time.py --layers "gla*2"

Prints and writes seconds of the first compiled step, which includes compiling, and of an eager step in the same process.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from prism.lab.results import write_results
from prism.models import PrismConfig, PrismForCausalLM

ROWS, TOKENS = 4, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="prism*2", help="a layer pattern")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "compile_time.json")
    arguments = parser.parse_args()

    import torch._inductor.config as inductor

    inductor.force_disable_caches = True
    torch.manual_seed(0)
    model = PrismForCausalLM(
        PrismConfig(vocab_size=256, hidden_size=128, num_heads=2, layers=arguments.layers, intermediate_size=256)
    )
    ids = torch.randint(0, 256, (ROWS, TOKENS))

    def seconds(call: Any) -> float:
        start = time.perf_counter()
        call(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        return time.perf_counter() - start

    seconds(model)
    figures = {"layers": arguments.layers, "eager": seconds(model), "first_compiled": seconds(torch.compile(model))}
    print(f"{arguments.layers}: first compiled step {figures['first_compiled']:.1f} s, eager {figures['eager']:.2f} s")
    write_results(arguments.output, figures, command=shlex.join(sys.argv))


if __name__ == "__main__":
    main()
