"""The versions of Triton and torch that the kernels accept, and the messages about all others."""

from __future__ import annotations

import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import prism
from prism.engine import engine_of, layer_ops
from prism.engine.kernels import available
from prism.engine.kernels.memory import dispatch
from prism.engine.networks import Averaged, InnerUpdate, Network


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)


@given(major=st.integers(2, 4), minor=st.integers(0, 12), suffix=st.sampled_from(["", ".1", ".0+git1a2b", "rc1"]))
def test_triton_is_accepted_from_3_6_to_3_9(major: int, minor: int, suffix: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        installed(patch, triton=f"{major}.{minor}{suffix}")
        problem = available.find_problem()
    if major == 3 and 6 <= minor <= 9:
        assert problem is None
    else:
        assert problem == (
            f"needs Triton 3.6 to 3.9 (pip install 'triton>=3.6,<3.10'), but {major}.{minor} is installed"
        )


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ({"pytorch-triton": "3.8.0+git1a2b"}, None),
        ({"triton-windows": "3.7.1.post2"}, None),
        ({"triton": "3.5.1", "pytorch-triton": "3.8.0"}, "3.5 is installed"),
        ({}, "none is installed"),
        ({"triton": "main"}, "0.0 is installed"),
    ],
)
def test_the_first_triton_that_is_installed_decides(
    versions: dict[str, str], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, **versions)
    found = available.find_problem()
    assert found is problem if problem is None else found is not None and found.endswith(problem)


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    assert available.find_problem() == "needs torch 2.6 or newer (pip install 'torch>=2.6'), not 2.5.1+cu124"


def small() -> prism.Update:
    return prism.Update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 1, 16), torch.randn(1, 2, 1, 1, 16))


def test_an_explicit_backend_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "PROBLEM", "needs Triton 3.6 to 3.9 (pip install …), but 3.10 is installed")
    for form in ("chunkwise", "recurrent"):
        with pytest.raises(ValueError, match=r"'triton' needs Triton 3.6 to 3.9 .*is served here by backend 'torch'"):
            prism.memory(small(), form=form, backend="triton")
    network = Network((torch.zeros(1, 16, 64), torch.zeros(1, 64, 16)))
    q = torch.zeros(1, 2, 1, 16)
    update = InnerUpdate(q, q, q, torch.zeros(1, 2, 1), network, Averaged(torch.ones(1)), 1)
    with pytest.raises(ValueError, match=r"'triton' needs Triton 3.6 to 3.9 .*is served here by backend 'torch'"):
        prism.memory(update, form="serial", backend="triton")


def on_gpu(**more: Any) -> Any:
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=torch.float16, **more)


def test_falling_back_to_torch_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "PROBLEM", "needs Triton 3.6 to 3.9 (pip install …), but 3.10 is installed")
    monkeypatch.setattr(available, "_warned", False)
    with pytest.warns(UserWarning, match=r"torch is used .* slower: backend 'triton' needs Triton"):
        assert not layer_ops.use_kernel(on_gpu())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.on_gpu(SimpleNamespace(w=on_gpu()))
        assert not layer_ops.use_kernel(on_gpu())


def test_there_is_no_warning_where_no_kernel_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_device("cpu")  # also where the other tests run on a GPU
    monkeypatch.setattr(available, "PROBLEM", "needs Triton 3.6 to 3.9 (pip install …), but none is installed")
    monkeypatch.setattr(available, "_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prism.memory(small())
        prism.Mixer("prism", 16, 1)(torch.randn(1, 3, 16))
        layer_ops.use_kernel(SimpleNamespace(is_cuda=True, dtype=torch.float64))  # no kernel serves float64
    monkeypatch.setattr(available, "PROBLEM", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layer_ops.use_kernel(on_gpu())


def test_the_serial_form_warns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "PROBLEM", "needs Triton 3.6 to 3.9 (pip install …), but 3.10 is installed")
    monkeypatch.setattr(available, "_warned", False)
    path = engine_of(InnerUpdate).forms["serial"][0]
    with pytest.warns(UserWarning, match="torch is used"):
        path.automatic(SimpleNamespace(q=on_gpu()))


def test_the_versions_are_those_that_the_package_asks_for() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    oldest, newest = (".".join(map(str, version)) for version in available.TRITON)
    assert f'gpu = ["triton>={oldest},<{newest};' in project
    assert f'"torch>={".".join(map(str, available.TORCH))}' in project
