"""Which device a name stands for."""

from __future__ import annotations

import pytest
import torch

from prism.device import pick_device


@pytest.mark.parametrize("name", ["auto", "cpu", "meta"])
def test_a_name_is_a_device(name: str) -> None:
    expected = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    assert pick_device(name).type == expected


def test_each_process_of_torchrun_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(torch, "empty", lambda *size, device: tried.append(str(device)))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [str(pick_device(name)) for name in ("cuda", "cuda:3")] == tried == ["cuda:1", "cuda:3"]


@pytest.mark.parametrize("name", ["abacus", "", "cuda:99"])
def test_a_device_that_is_not_here_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^device '{name}' cannot be used here: "):
        pick_device(name)
