"""When the kernels are chosen, when they are refused, and the device and thread on which they start."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import prism
from prism.engine import layer_ops
from prism.engine.kernels import available
from prism.engine.memory import chosen, engine_of
from tests.engine.kernels.problems import SMALLEST, leaves, tiles, update
from tests.engine.kernels.where import CAN_START, DEVICE, needs_kernels

pytestmark = needs_kernels

if CAN_START:
    from prism.engine.kernels.memory import segments


def test_a_tensor_with_a_tangent_uses_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_ops, "have_tangents", lambda x: x.dual)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for dual in (False, True):
        x: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=torch.float32, dual=dual)
        assert layer_ops.use_kernel(x) is not dual


def test_the_recurrent_form_has_gradients_on_the_kernels_too() -> None:
    """The decode kernel has none, so the chunk kernels compute them."""
    x = leaves(3, dtype=torch.float32)
    got, wanted = (
        torch.autograd.grad(prism.memory(update(x, read="before"), x["state"], "recurrent", backend)[0].sum(), x["k"])
        for backend in ("triton", "torch")
    )
    torch.testing.assert_close(got, wanted)


def test_automatic_choice_on_a_cpu_is_torch() -> None:
    with torch.device("cpu"):
        u = update(leaves(4, dtype=torch.float32))
    assert chosen(engine_of(prism.Update), u)[1].run.__module__ == "prism.engine.linear.chunkwise"


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"K": 257, "L": 1, "dtype": torch.float32}, "256"),
        ({"dtype": torch.float64}, "float64"),
        pytest.param(
            {"dtype": torch.bfloat16}, "interpreter", marks=pytest.mark.skipif(DEVICE != "cpu", reason="on a CPU")
        ),
    ],
)
def test_sizes_beyond_the_kernels_are_refused(sizes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        prism.memory(update(leaves(2, **sizes)), form="chunkwise", backend="triton")


def test_fla_serves_decays_per_channel_on_a_gpu_only() -> None:
    x = leaves(2, L=1, dtype=torch.float32)
    x["log_decay"] = -torch.rand(1, 2, 2, 16)
    on_cpu = update({name: z.cpu() for name, z in x.items()})
    with pytest.raises(ValueError, match="'fla' needs"):
        prism.memory(on_cpu, backend="fla")


@pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((8, 0), True)])
def test_kernels_around_the_memory_need_the_same_gpu(
    capability: tuple[int, int], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    tensor: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=torch.float16)
    assert layer_ops.use_kernel(tensor) is served


@pytest.mark.parametrize(("key_dim", "expected"), [(128, 8), (256, 1)])
def test_maps_that_are_too_large_give_one_segment(key_dim: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_multiprocessors", lambda device: 132)
    inputs = SimpleNamespace(w=SimpleNamespace(device=torch.device("cuda", 0)))
    run: Any = SimpleNamespace(u=inputs, configuration=tiles(32, 64), K=key_dim, V=4 * SMALLEST, heads=8, chunks=512)
    assert segments.segment_count(run) == expected


def test_kernels_start_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(available, "_create_context", lambda device: None)

    def on(index: int) -> Any:
        return SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))

    assert isinstance(available.device_guard(torch.zeros(1, device="cpu")), nullcontext)
    assert isinstance(available.device_guard(on(0)), nullcontext)
    there = available.device_guard(on(1))
    assert isinstance(there, torch.cuda.device) and there.idx == 1


def test_every_thread_that_starts_kernels_gets_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: begun.append((threading.get_ident(), device)))
    monkeypatch.setattr(available, "_initialised", threading.local())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    there: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    for _ in range(2):
        available.device_guard(there)
    other = threading.Thread(target=available.device_guard, args=(there,))
    other.start()
    other.join()
    available.device_guard(SimpleNamespace(is_cuda=False, device=torch.device("cpu")))
    assert [device for _, device in begun] == [there.device] * 2
    assert begun[0][0] == threading.get_ident() != begun[1][0]


def test_slots_decode_on_the_kernels_too() -> None:
    torch.manual_seed(0)
    mixer, x = prism.Mixer("gsa", 32, 2).to(DEVICE), torch.randn(1, 6, 32, device=DEVICE)
    with torch.no_grad():
        state = mixer(x[:, :5], backend="triton")[1]
        got, wanted = mixer(x[:, 5:], state, backend="triton")[0], mixer(x)[0][:, 5:]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
