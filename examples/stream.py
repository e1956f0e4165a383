"""Read a million tokens in constant memory: segments pass a state of fixed size on.

python examples/stream.py                     # a million tokens, a minute or two on a laptop
python examples/stream.py --tokens 20000
"""

import argparse
import time

import torch

import prism

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, default=1_000_000)
parser.add_argument("--segment", type=int, default=4096, help="tokens per call; any number gives the same answer")
parser.add_argument("--rule", default="prism")
arguments = parser.parse_args()

torch.manual_seed(0)
mixer = prism.Mixer(arguments.rule, width=64, heads=2)
state, read, sizes, start = None, 0, set(), time.perf_counter()
with torch.no_grad():
    while read < arguments.tokens:
        x = torch.randn(1, min(arguments.segment, arguments.tokens - read), 64)
        y, state = mixer(x, state)
        read += x.shape[1]
        sizes.add(state.nbytes)

seconds = time.perf_counter() - start
print(
    f"{read:,} tokens in {seconds:.1f} s; the state took {' or '.join(f'{n:,}' for n in sorted(sizes))} bytes throughout"
)
assert len(sizes) == 1, "the state grew"
assert torch.isfinite(y).all()
