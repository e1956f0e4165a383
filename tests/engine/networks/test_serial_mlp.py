"""The kernels of the serial form, on a GPU and in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import prism
from prism.engine.kernels import available
from prism.engine.memory import chosen, engine_of
from prism.engine.networks import Averaged, InnerUpdate, Network
from prism.engine.networks.serial import kernel_refuses

CAN_INTERPRET = available.PROBLEM is None and available.INTERPRETED
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


needs_interpreter = pytest.mark.skipif(not CAN_INTERPRET, reason="needs Triton's interpreter")


@needs_interpreter
def test_kernels_in_the_interpreter() -> None:
    check("cpu", SMALL)


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    check("cuda", SMALL + LARGE)


def draw(B: int, H: int) -> InnerUpdate:
    """An update of two tokens, for a network with biases, and a norm whose channels are not adjacent in memory."""
    q, k, v = (torch.randn(B, 2, H, 16) for _ in range(3))
    biases = torch.randn(H, 32), torch.randn(H, 16)
    norm = torch.randn(16, H).t(), torch.randn(16, H).t()
    network = Network((torch.randn(H, 16, 32), torch.randn(H, 32, 16)), biases, norm)
    return InnerUpdate(q, k, v, torch.full((B, 2, H), 0.01), network, Averaged(torch.ones(1)), 1)


@needs_interpreter
def test_the_kernel_reads_tensors_of_any_strides() -> None:
    """Of the norm, of a state that is one row expanded to a batch, and of gradients."""
    B, H = 3, 2
    update = draw(B, H)
    shapes = {"w1": (16, 32), "w2": (32, 16), "b1": (1, 32), "b2": (1, 16)}
    leaves = {name: torch.randn(1, H, *shape, requires_grad=True) for name, shape in shapes.items()}
    gradients = {name: torch.randn(H, B, *shape).transpose(0, 1) for name, shape in shapes.items()}

    def run(backend: str) -> list[Tensor]:
        o, end = prism.memory(update, {n: x.expand(B, -1, -1, -1) for n, x in leaves.items()}, "serial", backend)
        ends = [end[name] for name in shapes]
        return [o, *ends, *torch.autograd.grad(ends, list(leaves.values()), list(gradients.values()))]

    for got, wanted in zip(run("triton"), run("torch"), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_without_a_gpu_the_kernels_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"'triton' needs .*form 'serial' is served here by backend 'torch'"):
        prism.memory(draw(1, 1), form="serial", backend="triton")


def test_the_automatic_choice_on_a_cpu_is_torch() -> None:
    """Also where Triton's interpreter could run the kernel."""
    form, implementation = chosen(engine_of(InnerUpdate), draw(1, 1))
    assert (form, implementation.backend) == ("serial", "torch")


def test_a_gpu_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(available, "PROBLEM", None)
    old = SimpleNamespace(q=SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0)))
    assert kernel_refuses(old) == "needs a GPU of compute capability 8.0 or newer"
