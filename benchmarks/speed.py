"""Time the kernels, and compare them with their lower bounds and with other libraries at the same shapes.

A floor is a lower bound for any implementation: the bytes that must move (each input read once, each output written once) at
the bandwidth of a copy on this GPU, or the operations at the rate of a large bfloat16 product, whichever takes longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import prism
from candidates import compile_candidates_together
from prism.engine import memory_

CHUNK = 64


class Shape(NamedTuple):
    batch: int
    tokens: int
    heads: int
    width: int

    def __str__(self) -> str:
        return f"({self.batch}, {self.tokens}, {self.heads}, {self.width})"


GROUPED = (32, 48, 64)
"""Heads of the values where queries and keys have 16."""
SHAPES = (Shape(8, 4096, 16, 128), Shape(16, 2048, 12, 64), Shape(1, 32768, 16, 128))


class Ceilings(NamedTuple):
    """Rates that this GPU reaches, per second."""

    bytes: float
    operations: float


def milliseconds(run: Callable[[], Any]) -> float:
    """The median time of `run`, by device events."""
    from triton.testing import do_bench

    return do_bench(run, warmup=25, rep=100, return_mode="median")


def ceilings() -> Ceilings:
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() * 4 / milliseconds(lambda: target.copy_(source)) * 1e3
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return Ceilings(copied, 2 * 8192**3 / milliseconds(lambda: a @ b) * 1e3)


def floor(shape: Shape, writes: int, have: Ceilings, backward: bool) -> float:
    """Lower bound in milliseconds of PRISM with L writes in bfloat16, from counts per token and head (D = K = V, C = 64).

    Bytes: q, L keys and L values are read, one output is written, gates are ignored. The backward also reads dO and all inputs
    once more, and writes their gradients. Operations of the chunk form: the grams of the query and of the erase with L keys
    (4LCD; matrix units do not save half of a triangle), both looking up S (4D²), the grams applied (4LCD), T⁻¹ (2CD) and L
    outer products (2LD²). The backward has two products for each.
    """
    L, D, C = writes, shape.width, CHUNK
    rows = shape.batch * shape.tokens * shape.heads
    moved = 2 * D * (2 + 2 * L)
    operations = 8 * L * C * D + 4 * D * D + 2 * C * D + 2 * L * D * D
    if backward:
        moved += 2 * D * ((2 + 2 * L) + (1 + 2 * L))
        operations *= 3
    return max(rows * moved / have.bytes, rows * operations / have.operations) * 1e3


def inputs(shape: Shape, writes: int, substeps: int = 1, groups: int | None = None) -> list[Tensor]:
    """q, k, w, log-decay and β as leaves, and dO; q and k have `groups` heads, or as many as w."""
    B, T, H, D = shape
    G, R = groups or H, T * substeps
    draw = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = (F.normalize(torch.randn(B, *rows, D, **draw), dim=-1) for rows in ((T, G), (R, G, writes)))
    w, d_o = torch.randn(B, R, H, writes, D, **draw), torch.randn(B, T, H, D, **draw)
    g, beta = -0.1 * torch.rand(B, T, H, device="cuda"), torch.rand(B, R, H, device="cuda")
    return [*[x.requires_grad_() for x in (q, k, w, g, beta)], d_o]


def forward_and_backward(run: Callable[..., Tensor], *leaves: Tensor, d_o: Tensor) -> dict[str, float]:
    """Milliseconds of the forward alone, and of forward and backward."""

    def forward() -> None:
        with torch.no_grad():
            run(*leaves)

    def everything() -> None:
        torch.autograd.grad(run(*leaves), leaves, d_o)

    return {"forward": milliseconds(forward), "both": milliseconds(everything)}


def ours(shape: Shape, writes: int, substeps: int = 1, groups: int | None = None) -> dict[str, float]:
    *leaves, d_o = inputs(shape, writes, substeps, groups)

    def run(q: Tensor, k: Tensor, w: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        update = prism.Update(q, k, w, g, erase_strength=beta, erase_first=True, substeps=substeps)
        return prism.memory(update, form="chunkwise", backend="triton")[0]

    return forward_and_backward(run, *leaves, d_o=d_o)


def attention(shape: Shape) -> dict[str, float]:
    q, k, _, _, _, d_o = inputs(shape, 1)
    leaves = [x.detach().squeeze(3) if x.ndim == 5 else x.detach() for x in (q, k, d_o)]
    leaves = [x.transpose(1, 2).contiguous().requires_grad_() for x in leaves]
    return forward_and_backward(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *leaves, d_o=d_o.transpose(1, 2)
    )


def flash_linear_attention(shape: Shape, name: str, writes: int, groups: int | None = None) -> dict[str, float]:
    """Time flash-linear-attention: `gated_delta` (rank 1; q and k with `groups` heads), `delta_product` (n = L), or `comba`.

    `comba` is PRISM itself on a sequence L times as long, with p = 0 except for the first of every L tokens.
    """
    from fla.ops.common import chunk_o

    # Their gated backward refuses Triton 3.4 to 3.7.0 on Hopper, which miscompiles one of its kernels. Allowed for timing only.
    chunk_o.TRITON_ABOVE_3_7_1 = True
    compile_candidates_together()
    q, k, w, g, beta, d_o = inputs(shape, writes, groups=groups)
    if name == "comba":
        return comba(q, k, w, g, beta, d_o)
    k, v = (x.detach().transpose(2, 3).flatten(1, 2).requires_grad_() for x in (k, w))
    q, g = q.detach().requires_grad_(), g.detach().requires_grad_()
    beta = beta.detach().repeat_interleave(writes, 1).requires_grad_()
    if name == "gated_delta":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return forward_and_backward(lambda *x: chunk_gated_delta_rule(*x)[0], q, k, v, g, beta, d_o=d_o)
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    return forward_and_backward(
        lambda *x: chunk_gated_delta_product(*x, num_householder=writes)[0], q, k, v, g, beta, d_o=d_o
    )


def comba(q: Tensor, k: Tensor, w: Tensor, g: Tensor, beta: Tensor, d_o: Tensor) -> dict[str, float]:
    """Time PRISM as Comba on a sequence L times as long: the writes of a token follow one another, the first decays and
    erases, and the last is read. Comba writes β·v and scales q. Raises an error if the result is not PRISM's."""
    from fla.ops.comba import chunk_comba

    tensors = as_comba(*(z.detach() for z in (q, k, w, g, beta)))
    L, scale = k.shape[3], q.shape[-1] ** -0.5
    with torch.no_grad():
        wanted = prism.memory(
            prism.Update(q, k, (beta[..., None, None] * w).to(w), g, erase_strength=beta, erase_first=True)
        )
        got = chunk_comba(*tensors)[0][:, L - 1 :: L] / scale
    error = ((got - wanted[0]).float().norm() / wanted[0].float().norm()).item()
    if not error < 0.02:
        raise AssertionError(f"Comba computes another memory than PRISM: the outputs differ by {error:.1e}")
    return forward_and_backward(
        lambda *x: chunk_comba(*x)[0], *[z.requires_grad_() for z in tensors], d_o=_last(d_o, L)
    )


def as_comba(q: Tensor, k: Tensor, w: Tensor, g: Tensor, beta: Tensor) -> list[Tensor]:
    """The inputs q, k, v, p, g and β of Comba, `[B, T · L, H, …]`."""
    L = k.shape[3]
    keys, values = (z.transpose(2, 3).flatten(1, 2) for z in (k, w))
    first = (torch.arange(keys.shape[1], device=k.device) % L == 0)[None, :, None]
    gates, strengths = (z.repeat_interleave(L, 1) for z in (g, beta))
    p = torch.where(first.unsqueeze(-1), keys, 0.0)
    return [_last(q, L), keys.contiguous(), values.contiguous(), p, torch.where(first, gates, 0.0), strengths]


def _last(z: Tensor, count: int) -> Tensor:
    """`[B, T, H, D]` at the last of every `count` tokens, and zeros at the others."""
    return F.pad(z.unsqueeze(2), (0, 0, 0, 0, count - 1, 0)).flatten(1, 2)


def decode(batch: int, have: Ceilings, heads: int = 16, width: int = 128, writes: int = 2) -> dict[str, float]:
    """Microseconds of one step: called, and replayed from a CUDA graph of ten. The floor reads and writes the state once."""
    q, k, w, g, beta, _ = (x.detach() for x in inputs(Shape(batch, 1, heads, width), writes))
    state = torch.randn(batch, heads, width, width, device="cuda")

    def step() -> None:
        memory_(prism.Update(q, k, w, g, erase_strength=beta, erase_first=True), state, "triton")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            step()
    return {
        "called": 1e3 * milliseconds(step),
        "graph": 1e2 * milliseconds(graph.replay),
        "floor": 8e6 * state.numel() / have.bytes,
    }


FIRST_CALL = """
import time, torch, prism
from prism.engine.kernels.memory import operator as memory
import torch._dynamo  # torch.library imports it at the first call of any custom operator
torch.zeros(1, device="cuda").cpu()
def call(B, T, H):
    q, k, w = (torch.randn(B, T, H, *n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in ((), (2,), (2,)))
    g, beta = -torch.rand(B, T, H, device="cuda"), torch.rand(B, T, H, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    prism.memory(prism.Update(q, k, w, g, erase_strength=beta, erase_first=True))[0].sum().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - start
print(call(2, 256, 2), call(2, 131, 2), call(3, 256, 5), call(1, 65536, 2))
"""


def first_call() -> dict[str, float]:
    """Seconds of the first forward and backward with an empty compile cache, and of later calls: another length, another batch
    and number of heads, and a sequence long enough to run as segments."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALL],
            env={**os.environ, "TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=True,
        )
    names = ("first", "another length", "another batch and heads", "segments")
    return dict(zip(names, map(float, done.stdout.split()), strict=True))
