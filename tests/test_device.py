"""Which device a name stands for, and the warning about threads without a core of their own."""

from __future__ import annotations

import pytest
import torch

from prism import device
from prism.device import pick_device, without_subnormals


@pytest.mark.parametrize("name", ["auto", "cpu", "meta"])
def test_a_name_is_a_device(name: str) -> None:
    expected = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    assert pick_device(name).type == expected


def test_numbers_that_make_a_cpu_slow_become_zero() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot")
    torch.set_flush_denormal(False)
    tiny = torch.tensor([1e-30])
    assert (tiny * 1e-10).item() > 0
    for _ in range(2):
        with without_subnormals():
            assert (tiny * 1e-10).item() == 0
            with without_subnormals():
                pass
            assert (tiny * 1e-10).item() == 0
        assert (tiny * 1e-10).item() > 0


def test_each_process_of_torchrun_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(torch, "empty", lambda *size, device: tried.append(str(device)))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [str(pick_device(name)) for name in ("cuda", "cuda:3")] == tried == ["cuda:1", "cuda:3"]


@pytest.mark.parametrize("name", ["abacus", "", "cuda:99"])
def test_a_device_that_is_not_here_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^device '{name}' cannot be used here: "):
        pick_device(name)


@pytest.mark.parametrize(
    ("count", "busy", "warned"), [(2, 1.0, True), (2, 0.1, False), (1, 2.0, False), (4, 0.0, False)]
)
def test_crowded_cores_are_warned_about_once(
    count: int, busy: float, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_warned", False)
    monkeypatch.setattr(device, "busy_cores", lambda: busy)
    monkeypatch.setattr(device.os, "cpu_count", lambda: max(2, count))
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    said: list[str] = []
    for _ in range(2):
        device.warn_if_crowded(said.append)
    assert len(said) == warned
    assert all("OMP_NUM_THREADS=1" in line and "about 1 of 2 cores" in line and "\n" not in line for line in said)


def test_busy_cores_are_counted_from_the_system_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(1000, 500), (1040, 510)])
    monkeypatch.setattr(device, "_ticks", lambda: next(readings))
    monkeypatch.setattr(device.os, "cpu_count", lambda: 4)
    assert device.busy_cores() == 3.0


def test_without_a_clock_the_load_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_ticks", lambda: None)
    monkeypatch.setattr(device.os, "getloadavg", lambda: (1.5, 0.0, 0.0), raising=False)
    assert device.busy_cores() == 1.5
