"""Memories with a decay per channel on the CPU, and pure-torch code of other libraries for the same: what cpu.py times.

KDA, Gated DeltaNet-2, GLA and RWKV-7, forward and backward. flash-linear-attention's naive functions are references that it
tests its kernels against, not meant to be fast, but they are what it has without a GPU; transformers has a chunked KDA.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import prism
from prism.rules.parts import l2_normalize

HEADS, KEY, VALUE = 8, 64, 64
RULES = ("kda", "gdn2", "gla", "rwkv7")


def channel_inputs(tokens: int, decay: float = 0.02) -> dict[str, Tensor]:
    """Leaves for every rule; `erase` and `write` are gates per channel, `beta` is one per head."""
    torch.manual_seed(0)
    shape = (1, tokens, HEADS)
    leaves = {
        "q": l2_normalize(torch.randn(*shape, KEY)),
        "k": l2_normalize(torch.randn(*shape, KEY)),
        "v": torch.randn(*shape, VALUE),
        "log_decay": -decay * torch.rand(*shape, KEY),
        "beta": torch.rand(*shape),
        "erase": torch.rand(*shape, KEY),
        "write": torch.rand(*shape, VALUE),
    }
    return {name: x.requires_grad_() for name, x in leaves.items()}


def _kda(x: dict[str, Tensor]) -> prism.Update:
    w = x["beta"].unsqueeze(-1) * x["v"]
    return _update(x, w, erase_strength=x["beta"], erase_first=True)


def _gdn2(x: dict[str, Tensor]) -> prism.Update:
    return _update(x, x["write"] * x["v"], erase_key=x["erase"] * x["k"], erase_write_first=True)


def _gla(x: dict[str, Tensor]) -> prism.Update:
    return _update(x, x["v"])


def _rwkv7(x: dict[str, Tensor]) -> prism.Update:
    return _update(x, x["v"], erase_key=x["k"], erase_write=x["erase"] * x["k"], erase_on="undecayed")


def _update(x: dict[str, Tensor], w: Tensor, **more: Any) -> prism.Update:
    return prism.Update(x["q"], x["k"].unsqueeze(3), w.unsqueeze(3), x["log_decay"], **more)


UPDATES = {"kda": _kda, "gdn2": _gdn2, "gla": _gla, "rwkv7": _rwkv7}


def _answer_by_fla(rule: str) -> Callable[[dict[str, Tensor]], Tensor]:
    """The naive function of a rule: chunks where there are, else the loop over tokens. Theirs multiply q by K^-½."""
    with warnings.catch_warnings():  # on a machine without a GPU it says so on import
        warnings.simplefilter("ignore")
        modules = {"rwkv7": "generalized_delta_rule.dplr"}
        naive = import_module(f"fla.ops.{modules.get(rule, rule)}.naive")
    root = KEY**0.5

    def answer(x: dict[str, Tensor]) -> Tensor:
        q, k, v, g = x["q"], x["k"], x["v"], x["log_decay"]
        if rule == "kda":
            return naive.naive_chunk_kda(q, k, v, g, x["beta"], scale=1.0)[0]
        if rule == "gdn2":
            return naive.naive_chunk_gdn2(q, k, v, g, x["erase"], x["write"], scale=1.0)[0]
        if rule == "gla":
            return naive.naive_recurrent_gla(q * root, k, v, g)[0]
        heads_first = [z.transpose(1, 2) for z in (q * root, k, v, -k, x["erase"] * k, g)]
        return naive.dplr_chunkwise(*heads_first)[0].transpose(1, 2)

    return answer


def _answer_by_transformers() -> Callable[[dict[str, Tensor]], Tensor]:
    from transformers.models.kimi_linear import modeling_kimi_linear

    chunks = inspect.unwrap(modeling_kimi_linear.chunk_kimi_delta_attention)

    def answer(x: dict[str, Tensor]) -> Tensor:
        return chunks(x["q"] * KEY**0.5, x["k"], x["v"], x["log_decay"], x["beta"])[0]

    return answer


def _ours(rule: str) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda x: prism.memory(UPDATES[rule](x), form="chunkwise", backend="torch")[0]


def answers(rule: str) -> dict[str, Callable[[dict[str, Tensor]], Tensor]]:
    """What computes a rule's answers `[1, T, H, V]` here: ours, and what is installed of the others."""
    found = {"prism": _ours(rule)}
    if find_spec("fla") is not None:
        found["fla_naive"] = _answer_by_fla(rule)
    if rule == "kda" and find_spec("transformers") is not None:
        found["transformers"] = _answer_by_transformers()
    return found


def candidates(rule: str, tokens: int, others: bool = True) -> dict[str, Callable[[], None]]:
    """Forward and backward of ours and with `others` of each other, after a check that all compute the same."""
    x = channel_inputs(tokens)
    found = answers(rule) if others else {"prism": _ours(rule)}
    with torch.no_grad():
        ours = found["prism"](x)
        for name, answer in found.items():
            if not torch.allclose(answer(x), ours, atol=1e-4, rtol=1e-3):
                raise RuntimeError(f"{name} does not compute the answers of ours for {rule}")

    def run(answer: Callable[[dict[str, Tensor]], Tensor]) -> None:
        torch.autograd.grad(answer(x).sum(), list(x.values()), allow_unused=True)

    return {name: lambda answer=answer: run(answer) for name, answer in found.items()}
