"""The kernels of the serial form, on a GPU and in Triton's interpreter.

The interpreter runs in a separate process, because Triton chooses it when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import prism
from prism.engine.kernels import available
from prism.engine.networks import Averaged, InnerUpdate, Network

ROOT = Path(__file__).parents[3]
SMALL = [
    {"tokens": 4, "bias": True, "norm": True, "residual": True},
    {"tokens": 3, "bias": False, "norm": False, "residual": False, "loss_scale": 1.0, "hidden": 32},
    {"tokens": 4, "bias": False, "norm": True, "residual": True, "real": 2},
    {"tokens": 2, "bias": True, "norm": False, "residual": True},
]
LARGE = [{**case, "tokens": 300, "width": 64, "hidden": 256} for case in (SMALL[0], SMALL[2])]


def errors(
    device: str,
    backend: str,
    tokens: int,
    bias: bool,
    norm: bool,
    residual: bool,
    loss_scale: float = 0.5,
    width: int = 16,
    hidden: int = 64,
    real: int | None = None,
) -> dict[str, float]:
    """Relative errors of output, state and all gradients of a backend in float32, against the recurrence in float64."""
    B, H, generator = 2, 2, torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    leaves = {name: normal(B, tokens, H, width) for name in "qkv"}
    leaves |= {"rate": torch.rand(B, tokens, H, generator=generator) / (2 * width), "tau": torch.tensor([1.1])}
    leaves |= {"w1": normal(H, width, hidden) * width**-0.5, "w2": normal(H, hidden, width) * hidden**-0.5}
    leaves |= {"b1": 0.1 * normal(H, hidden), "b2": 0.1 * normal(H, width)} if bias else {}
    leaves |= {"scale": 1 + 0.1 * normal(H, width), "shift": 0.1 * normal(H, width)} if norm else {}
    mask = None if real is None else (torch.arange(tokens) < torch.tensor([[tokens], [real]])).to(device)

    def run(dtype: torch.dtype, form: str, backend: str) -> dict[str, Tensor]:
        x = {name: leaf.to(device, dtype).requires_grad_() for name, leaf in leaves.items()}
        network = Network(
            (x["w1"], x["w2"]),
            (x["b1"], x["b2"]) if bias else None,
            (x["scale"], x["shift"]) if norm else None,
            residual,
            loss_scale,
        )
        update = InnerUpdate(x["q"], x["k"], x["v"], x["rate"], network, Averaged(x["tau"]), 1, None, mask)
        # Two calls, so that the gradient of the state is checked too.
        o, state = prism.memory(update, None, form, backend)
        again, state = prism.memory(update, state, form, backend)
        outputs = {"o": o, "again": again, **state}
        drawn = torch.Generator().manual_seed(1)
        loss = sum((y * torch.randn(y.shape, generator=drawn).to(y)).sum() for y in outputs.values())
        gradients = torch.autograd.grad(loss, list(x.values()))
        return {**outputs, **{f"d {name}": g for name, g in zip(x, gradients, strict=True)}}

    expected, got = run(torch.float64, "recurrent", "torch"), run(torch.float32, "serial", backend)
    assert expected.keys() == got.keys()
    return {name: ((got[name].double() - y).norm() / y.norm()).item() for name, y in expected.items()}


def check(device: str, cases: list[dict]) -> None:
    for case in cases:
        plain = errors(device, "torch", **case)
        for name, error in errors(device, "triton", **case).items():
            assert error <= max(1e-5, 3 * plain[name]), f"{case} {name}: {error:.2g}, torch has {plain[name]:.2g}"


@pytest.mark.skipif(os.environ.get("PRISM_TEST_GPU") == "1", reason="`make test` runs the interpreter")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is for Linux")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["checked", str(len(SMALL))]


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    check("cuda", SMALL + LARGE)


def test_without_a_gpu_the_kernels_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "INTERPRETED", False)
    q = torch.zeros(1, 2, 1, 16)
    network = Network((torch.zeros(1, 16, 64), torch.zeros(1, 64, 16)))
    update = InnerUpdate(q, q, q, torch.zeros(1, 2, 1), network, Averaged(torch.ones(1)), 1)
    with pytest.raises(ValueError, match=r"'triton' needs .*form 'serial' is served here by backend 'torch'"):
        prism.memory(update, form="serial", backend="triton")


if __name__ == "__main__":
    check("cpu", SMALL)
    print("checked", len(SMALL))
