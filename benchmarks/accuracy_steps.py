"""Check a layer's decode step in a few kernels (prism.engine.token) against float64, compared with torch.

The bound is that of accuracy.py: at most twice the error of torch with the same weights, states and dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from accuracy import FLOOR, error, unwritten_memory_is_nan
from prism.engine import using
from prism.nn.block import Block
from prism.nn.state import State

HEAD = {"key_dim": 128, "value_dim": 128}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "prism, rank 3, gelu": ("prism", {**HEAD, "steps": 3, "solver": "gelu"}),
    "gated_delta, 96 × 192": ("gated_delta", {"key_dim": 96, "value_dim": 192}),
    "kda": ("kda", HEAD),
}
PROMPT, STEPS, ROWS = 16, 4, 33


def layers(device: str, dtype: torch.dtype, tiny: bool = False) -> Iterator[dict[str, Any]]:
    """One result per layer: errors of the outputs and of every state after some steps."""
    for name, (rule, options) in LAYERS.items():
        sizes = {"key_dim": 16, "value_dim": 8} if tiny else {}
        yield _check(name, rule, {**options, **sizes}, 24 if tiny else 256, 2 if tiny else ROWS, device, dtype)


@torch.no_grad()
def _check(
    name: str, rule: str, options: dict[str, Any], width: int, rows: int, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = Block(rule, width, 2, 2 * width, **options).eval().to(device, dtype)
    exact = copy.deepcopy(layer).double()
    x = torch.randn(rows, PROMPT + STEPS, width, device=device).to(dtype)
    prompt, tokens = x.split([PROMPT, STEPS], 1)
    with using(backend="torch"):
        start = layer(prompt)[1]
        reference = _steps(exact, tokens.double(), start.map(Tensor.double))
        theirs = _steps(layer, tokens, start)
    with using(backend="triton"), unwritten_memory_is_nan():
        ours = _steps(layer, tokens, start)
    errors = {part: {"kernel": error(ours[part], z), "torch": error(theirs[part], z)} for part, z in reference.items()}
    good = all(e["kernel"] <= max(2 * e["torch"], FLOOR) for e in errors.values())
    case = {"what": f"decode step, {name}", "dtype": str(dtype).removeprefix("torch.")}
    return {"case": case, "errors": errors, "good": good}


def _steps(layer: Block, tokens: Tensor, state: State) -> dict[str, Tensor]:
    """Outputs token by token, and the last state's tensors."""
    outputs = []
    for token in tokens.unbind(1):
        y, state = layer.decode(token, state)
        outputs.append(y)
    return {"y": torch.stack(outputs, 1), **state.tensors()}
