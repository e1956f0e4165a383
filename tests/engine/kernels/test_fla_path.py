"""Decays per channel on flash-linear-attention's kernels: their inputs mean the same update as ours.

Without a GPU, their reference implementations replace their kernels: independent code for the same equations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import prism
from prism.engine.kernels import fla
from prism.rules.parts import l2_normalize
from tests.engine.kernels.where import DEVICE

KINDS: dict[str, dict[str, Any]] = {
    "GLA": {},
    "RWKV-6": {"read": "before"},
    "DPLR": {"erase": "write", "erase_on": "undecayed"},
    "DPLR of a strength": {"erase": "strength", "erase_on": "undecayed"},
    "Gated DeltaNet 2": {"erase": "first"},
}


def leaves(erase: str, T: int, K: int, V: int, strong: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs of an update and a state. Some tokens write but erase nothing, which KDA, whose write is β·v, does not have."""
    B, H = 2, 2
    generator = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(B, T, H, *shape, generator=generator, device="cpu").to(dtype)

    x = {"q": l2_normalize(normal(K)), "k": l2_normalize(normal(1, K)), "w": normal(1, V)}
    x["log_decay"] = (-5.0 if strong else -0.1) * normal(K).float().sigmoid()
    strength = normal().float().sigmoid() * (normal().float() > -1)
    if erase in ("write", "strength"):
        x["erase_key"] = l2_normalize(normal(K))
    if erase == "write":
        x["erase_write"] = (strength.unsqueeze(-1) * x["erase_key"]).to(dtype)
    elif erase:
        x["erase_strength"] = strength
    x["state"] = torch.randn(B, H, K, V, generator=generator, device="cpu")
    return x


def compute(
    x: dict[str, Tensor], kind: dict[str, Any], run: Callable[[prism.Update, Tensor], tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    given = {name: z.detach().requires_grad_() for name, z in x.items()}
    fields = {name: z for name, z in given.items() if name != "state"}
    more = {name: value for name, value in kind.items() if name != "erase"}
    o, end = run(prism.Update(**fields, **more, erase_first=kind.get("erase") == "first"), given["state"])
    loss = o.double().square().sum() + (end.double() * torch.linspace(-1, 1, end.shape[-1], device=end.device)).sum()
    gradients = torch.autograd.grad(loss, list(given.values()))
    return {"o": o, "end": end, **{f"d_{n}": z for n, z in zip(given, gradients, strict=True)}}


def errors(kind: str, run: Any, x: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors of outputs, the final state and every gradient, against the recurrence in float64."""
    exact = compute(
        {n: z.double().cpu() for n, z in x.items()}, KINDS[kind], lambda u, s: prism.memory(u, s, "recurrent")
    )
    got = {name: z.double().cpu() for name, z in compute(x, KINDS[kind], run).items()}
    return {name: ((got[name] - z).norm() / z.norm()).item() for name, z in exact.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_their_inputs_are_the_same_update(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_reference_code(monkeypatch)
    found = errors(kind, fla.run, leaves(KINDS[kind].get("erase", ""), 9, 8, 6, False, torch.float32))
    assert max(found.values()) <= 1e-5, found


def use_reference_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace their kernels by their naive implementations."""
    pytest.importorskip("fla", reason="needs flash-linear-attention, which needs Triton: not on macOS")
    from fla.ops.gdn2.naive import naive_recurrent_gdn2
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    def swapped(*tensors: Tensor) -> list[Tensor]:
        return [z.transpose(1, 2) for z in tensors]

    def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, **more: Any) -> Any:
        return naive_recurrent_gla(scale * q * q.shape[-1] ** 0.5, k, v, g, **more)

    def rwkv6(q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor, scale: float, **more: Any) -> Any:
        o, end = naive_recurrent_rwkv6(*swapped(q, k, v, g), u, scale=scale, **more)
        return o.transpose(1, 2), end

    def dplr(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, scale: float, **more: Any) -> Any:
        o, end = dplr_recurrence(*swapped(scale * q * q.shape[-1] ** 0.5, k, v, a, b, g), **more)
        return o.transpose(1, 2), end

    monkeypatch.setattr("fla.ops.gla.chunk_gla", gla)
    monkeypatch.setattr("fla.ops.rwkv6.chunk_rwkv6", rwkv6)
    monkeypatch.setattr("fla.ops.generalized_delta_rule.chunk_dplr_delta_rule", dplr)
    monkeypatch.setattr("fla.ops.gdn2.chunk_gdn2", naive_recurrent_gdn2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_their_kernels_on_a_gpu(kind: str) -> None:
    """Errors are a few roundings of bfloat16 (4e-3). The kernels are autotuned first, which takes a minute or two."""
    pytest.importorskip("fla")
    for strong in (False, True):
        x = leaves(KINDS[kind].get("erase", ""), 130, 64, 64, strong, torch.bfloat16)
        x = {name: z.to(DEVICE) for name, z in x.items()}
        found = errors(kind, lambda u, s: prism.memory(u, s, "chunkwise", "fla"), x)
        assert max(found.values()) <= 2e-2, f"{'strong' if strong else 'weak'} decay: {found}"
