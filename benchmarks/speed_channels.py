"""Time memories with a decay per key channel, ours and flash-linear-attention's, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import prism
from candidates import compile_candidates_together
from speed import Shape, forward_and_backward

RULES = ("KDA", "Gated DeltaNet-2", "GLA", "RWKV-7")
SHAPES = (Shape(8, 4096, 16, 128), Shape(1, 32768, 16, 128))


def inputs(
    shape: Shape, rule: str, writes: int = 1, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """q, k, w, log-decay and what the rule erases with: β (KDA), b (Gated DeltaNet-2), b and a (RWKV-7). Then dO.

    k and w are `[B, T, H, writes, D]`.
    """
    B, T, H, D = shape

    def normal(*more: int) -> Tensor:
        return torch.randn(B, T, H, *more, D, device=device, dtype=dtype)

    q, k = F.normalize(normal(), dim=-1), F.normalize(normal(writes), dim=-1)
    gate = -0.1 * torch.rand(B, T, H, D, device=device)
    erase = {
        "KDA": lambda: [torch.rand(B, T, H, device=device)],
        "Gated DeltaNet-2": lambda: [k[..., 0, :] * torch.rand_like(q)],
        "GLA": lambda: [],
        "RWKV-7": lambda: [key := F.normalize(normal(), dim=-1), 0.5 * key],
    }[rule]()
    return [*[x.requires_grad_() for x in (q, k, normal(writes), gate, *erase)], normal()]


def update(rule: str, q: Tensor, k: Tensor, w: Tensor, g: Tensor, *erase: Tensor) -> prism.Update:
    """The update of a rule, from its `inputs`."""
    tokens = (q, k, w, g)
    if rule == "KDA":
        return prism.Update(*tokens, erase_strength=erase[0], erase_first=True)
    if rule == "Gated DeltaNet-2":
        return prism.Update(*tokens, erase_key=erase[0], erase_write_first=True)
    if rule == "RWKV-7":
        return prism.Update(*tokens, erase_key=erase[0], erase_write=erase[1], erase_on="undecayed")
    return prism.Update(*tokens)


def ours(shape: Shape, rule: str, writes: int = 1) -> dict[str, float]:
    *leaves, d_o = inputs(shape, rule, writes)

    def run(*tensors: Tensor) -> Tensor:
        return prism.memory(update(rule, *tensors), form="chunkwise", backend="triton")[0]

    return forward_and_backward(run, *leaves, d_o=d_o)


def flash_linear_attention(shape: Shape, rule: str) -> dict[str, float]:
    """Time their operator. KDA's writes β·v, and Gated DeltaNet-2's has gates for the erase and the write: those are given."""
    compile_candidates_together()
    q, k, w, g, *erase, d_o = inputs(shape, rule)
    k, w = (x.detach().squeeze(3).requires_grad_() for x in (k, w))
    if rule == "Gated DeltaNet-2":
        erase = [torch.rand_like(z, dtype=z.dtype).requires_grad_() for z in (k, w)]
    return forward_and_backward(_their_operator(rule), q, k, w, g, *erase, d_o=d_o)


def _their_operator(rule: str) -> Callable[..., Tensor]:
    if rule == "KDA":
        from fla.ops.kda import chunk_kda

        return lambda q, k, v, g, beta: chunk_kda(q, k, v, g, beta, scale=1.0)[0]
    if rule == "Gated DeltaNet-2":
        from fla.ops.gdn2 import chunk_gdn2

        return lambda q, k, v, g, b, w: chunk_gdn2(q, k, v, g, b, w, scale=1.0)[0]
    if rule == "GLA":
        from fla.ops.gla import chunk_gla

        return lambda q, k, v, g: chunk_gla(q, k, v, g, scale=1.0)[0]
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule

    return lambda q, k, v, g, b, a: chunk_dplr_delta_rule(q, k, v, b, -a, g, scale=1.0)[0]
