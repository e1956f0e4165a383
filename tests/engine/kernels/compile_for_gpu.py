"""Compile the kernels of one group for an H100 or H200 on any machine, start none, and print their names.

The interpreter runs kernels as Python. It does not see what the compiler refuses (a type that differs between two branches,
or code after a `return`), nor how much shared memory a kernel needs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = 227 * 1024
"""Bytes per multiprocessor of an H100 or H200."""


class NoDriver:
    """A stand-in for a GPU driver, with the methods that the compiler calls."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only() -> None:
    """Make every launch in this process compile its kernel and not start it."""
    from prism.engine.kernels.runtime import Program

    run = JITFunction.run

    def compiled(kernel: Any, *arguments: Any, **options: Any) -> Any:
        result = run(kernel, *arguments, **{**options, "warmup": True})
        assert result.metadata.shared <= SHARED_MEMORY, f"{kernel.fn.__name__} needs {result.metadata.shared} bytes"
        print(kernel.fn.__name__)
        return result

    def start(program: Program, count: int, *arguments: Any) -> None:
        program.kernel.run(*arguments, grid=(count,), **program.constants, **program.options)

    driver.set_active(NoDriver())
    JITFunction.run = compiled
    Program.start = start


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def forward_and_backward(outputs: Sequence[Tensor]) -> None:
    """Run the backward of these outputs too."""
    torch.autograd.backward(outputs, [torch.zeros_like(z) for z in outputs])


def one(
    K: int,
    V: int,
    J: int,
    dtype: torch.dtype = torch.bfloat16,
    gates: bool = True,
    erase: str = "first",
    documents: bool = False,
    segments: int = 1,
    groups: int = 2,
    substeps: int = 1,
) -> None:
    """The chunk kernels for J writes to memories of K by V."""
    from prism.engine.kernels.memory import operator as chunks
    from prism.engine.kernels.memory.configurations import MEASURED, default, forced

    B, T, H, single = 1, 70, 2, torch.float32
    G, R = groups, T * substeps
    strength = leaf(B, R, H, dtype=single) if erase == "first" else None
    own = leaf(B, R, G, K, dtype=dtype) if erase == "own" else None
    tokens = leaf(B, T, G, K, dtype=dtype), leaf(B, R, G, J, K, dtype=dtype), leaf(B, R, H, J, V, dtype=dtype)
    numbers = torch.zeros(B, T, dtype=torch.int32) if documents else None
    state = leaf(B, H, K, V, dtype=single) if segments > 1 else None
    how = MEASURED.get((K, V, J, "sm90")) or default(K, V, dtype)
    with forced(replace(how, segments=segments)):
        decay = leaf(B, T, H, dtype=single) if gates else None
        forward_and_backward(chunks.memory(*tokens, decay, own, strength, numbers, state, True)[:2])


def memory() -> None:
    """The chunk and decode kernels, with every option in some call."""
    from prism.engine.kernels.token import decode

    B, H, single = 1, 2, torch.float32
    one(128, 128, 2)
    one(64, 64, 1, segments=3)
    one(64, 64, 2, erase="own", documents=True, groups=1, substeps=2)
    one(64, 64, 1, gates=False, erase="none", dtype=torch.float16)
    token = [leaf(B, 1, H, *more).detach() for more in ((128,), (2, 128), (2, 128))]
    gate = leaf(B, 1, H, dtype=single).detach()
    decode.step(*token, gate, token[0], gate, None, None, None, torch.zeros(B, H, 128, 128), 1)
    decode.step(*token, gate, token[1][..., 0, :], None, token[0], None, None, torch.zeros(B, H, 128, 128), 1)
    decode.step(*token, None, None, None, None, gate[..., 0] > 1, gate[..., 0] > 1, None, 1)
    half = torch.zeros(B, H, 128, 128, dtype=torch.bfloat16)
    decode.step(*token, token[0].float(), token[0], None, token[1][..., 0, :], None, None, half, 1, True, True)


def sizes() -> None:
    """The chunk kernels in other sizes and in float32."""
    one(32, 32, 1, dtype=torch.float32)
    one(32, 64, 1, groups=1, substeps=2, documents=True)
    one(32, 32, 6)
    one(64, 64, 2, erase="own", documents=True)


def channels() -> None:
    """The chunk kernels of a decay per key channel."""
    from prism.engine.kernels.memory.channel_configurations import MEASURED, default
    from prism.engine.kernels.memory.channel_operator import channel_memory
    from prism.engine.kernels.memory.configurations import forced

    T, single = 40, torch.float32

    def one(
        K: int,
        J: int,
        erase: str = "first",
        G: int = 2,
        reads: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        segments: int = 1,
    ) -> None:
        own = leaf(1, T, G, K, dtype=dtype) if erase == "own" else None
        strength = leaf(1, T, 2, dtype=single) if erase == "first" else None
        tokens = leaf(1, T, G, K, dtype=dtype), leaf(1, T, G, J, K, dtype=dtype), leaf(1, T, 2, J, K, dtype=dtype)
        numbers = torch.zeros(1, T, dtype=torch.int32) if G == 1 else None
        how = MEASURED.get((K, K, J, "sm90")) or default(K, K, dtype)
        with forced(replace(how, segments=segments)):
            decay = leaf(1, T, 2, K, dtype=single)
            forward_and_backward(channel_memory(*tokens, decay, own, strength, numbers, None, reads, True)[:2])

    one(128, 1, "own", 1, 3, segments=2)


def around_the_memory() -> None:
    """The kernels of `prism.engine.layer_ops`."""
    from prism.engine.kernels.ops.columns import columns
    from prism.engine.kernels.ops.conv_columns import conv_columns
    from prism.engine.kernels.ops.cross_entropy import token_losses
    from prism.engine.kernels.ops.short_conv import short_conv
    from prism.engine.kernels.ops.solver import solve

    B, T, H, K, V, N = 1, 70, 2, 64, 36, 2
    mixed, beta, scale = leaf(B, T, H * (2 * K + V)), leaf(B, T, H), leaf(N, H, V, dtype=torch.float32)
    keys, u, p, betas = leaf(B, T, H, N, K), leaf(B, T, H, V), leaf(B, T, H, N, V), leaf(B, T, H, N)
    forward_and_backward(columns(mixed, beta, None, None, None, None, None, K, 0.1, 1e-6, False, False))
    forward_and_backward(columns(mixed, beta, keys, u, p, betas, scale, K, 0.1, 1e-6, False, True))
    forward_and_backward(columns(mixed, beta, None, None, None, betas, scale, K, 0.1, 1e-6, True, True))
    for options in ((True, True), (True, False), (False, True), (False, False)):  # GELU or closed, non-linear or not
        forward_and_backward([solve(u, None, None, betas, None, *options)])
        forward_and_backward([solve(u, u, p, betas, scale, *options)])
    x, weight, bias = leaf(B, T, 48), leaf(4, 48, dtype=torch.float32), leaf(48, dtype=torch.float32)
    documents, window = torch.zeros(B, T, dtype=torch.int32), torch.zeros(B, 3, 48, dtype=torch.bfloat16)
    forward_and_backward([short_conv(x, weight, None, None, None, True)])
    forward_and_backward([short_conv(x, weight, bias, window, documents, False)])
    projected, taps, numbers = leaf(B, T, H * 4 * K), leaf(3, H * 4 * K, dtype=torch.float32), documents
    before, options = torch.zeros(B, 2, H * 4 * K, dtype=torch.bfloat16), (K, 0.1, 1e-6)
    u, p, scale = leaf(B, T, H, 2 * K), leaf(B, T, H, N, 2 * K), leaf(N, H, 2 * K, dtype=torch.float32)
    forward_and_backward(conv_columns(projected, taps, before, numbers, beta, *[None] * 5, *options, False, False))
    for later, gelu in (((keys, u, p, betas, scale), False), ((None, None, None, betas, scale), True)):
        forward_and_backward(conv_columns(projected, taps, None, None, beta, *later, *options, gelu, True))
    for dtype in (torch.bfloat16, None):
        token_losses(torch.zeros(3, 320), torch.zeros(3, dtype=torch.int64), -100, 0.0, dtype)


def pieces_of_a_layer() -> None:
    """The kernels of `prism.engine.layer_ops`."""
    from prism.engine.kernels.ops import layer_ops as pieces

    x, delta, weight = torch.zeros(5, 768), torch.zeros(5, 768, dtype=torch.bfloat16), torch.zeros(768)
    for added in (delta, None):
        pieces.residual_norm(x, added, weight, 1e-6, torch.bfloat16)
    for above, dtype in ((x, torch.bfloat16), (None, None)):
        pieces.residual_norm_backward(x, weight, above, delta, 1e-6, dtype)
    pieces.residual_sum(x, delta)
    pieces.product(delta)
    pieces.product_backward(delta, torch.zeros(5, 384, dtype=torch.bfloat16))
    o, head = delta.view(30, 128), torch.zeros(128)
    for by_sigmoid in (False, True):
        pieces.gated_norm(o, o, head, 1e-5, by_sigmoid)
        pieces.gated_norm_backward(o, o, head, o, 1e-5, by_sigmoid)


def networks() -> None:
    """The kernels of memories that are networks."""
    from prism.engine.kernels.network.serial_mlp import serial_mlp

    B, T, H, D, M = 1, 5, 2, 64, 256
    single = torch.float32
    tokens = [leaf(B, T, H, D, dtype=single) for _ in range(3)]
    weights = leaf(B, H, D, M, dtype=single), leaf(B, H, M, D, dtype=single)
    biases = leaf(B, H, 1, M, dtype=single), leaf(B, H, 1, D, dtype=single)
    norm = leaf(H, D, dtype=single), leaf(H, D, dtype=single)
    rate = leaf(B, T, H, dtype=single)
    forward_and_backward(serial_mlp(*tokens, rate, *weights, *biases, *norm, True)[:5])
    forward_and_backward(serial_mlp(*tokens, rate, *weights, None, None, None, None, True)[:3])


def one_token() -> None:
    """The kernels of `prism.engine.token`, at the sizes of small and large models."""
    from prism.engine import token
    from prism.nn.block import Block

    token.kernels_serve = lambda *_: True  # nothing is started here

    def layer(
        rule: str, width: int, heads: int, rows: int, dtype: torch.dtype, state: torch.dtype, **options: Any
    ) -> None:
        block, x = Block(rule, width, heads, 2 * width, **options).eval(), torch.zeros(rows, 1, width)
        with torch.no_grad():
            before = block(x)[1].map(lambda z: z.to(dtype).contiguous())
            block.to(dtype).decode(x[:, 0].to(dtype), replace(before, memory=before.memory.to(state)))

    half, single = torch.bfloat16, torch.float32
    head = {"key_dim": 128, "value_dim": 128}
    layer("prism", 768, 6, 32, half, single, **head)
    layer("prism", 768, 6, 256, half, half, **head, steps=3, solver="gelu")
    layer("prism", 96, 2, 1, torch.float16, single, shared_key=True, gain=False, residual="value", conv_size=1)
    layer("prism", 128, 1, 3, half, single, **head, forget="channel")
    layer("gated_delta", 128, 1, 3, half, single, key_dim=256, value_dim=512)
    layer("delta_product", 64, 2, 3, single, single, forget_gate=True)
    layer("kda", 128, 1, 3, half, single, **head)
    layer("kda", 64, 1, 3, torch.float16, half, key_dim=32, value_dim=64, lower_bound=-5.0)


GROUPS = {
    "memory": memory,
    "sizes": sizes,
    "channels": channels,
    "around": around_the_memory,
    "pieces": pieces_of_a_layer,
    "networks": networks,
    "token": one_token,
}

if __name__ == "__main__":
    compile_only()
    GROUPS[sys.argv[1]]()
