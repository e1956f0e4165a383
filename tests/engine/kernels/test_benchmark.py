"""benchmarks/gpu.py times no kernels that failed its accuracy check."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("good", [True, False])
def test_inaccurate_kernels_are_not_timed(good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu: Any = importlib.import_module("gpu")
    timed = []

    def ceilings() -> Any:
        timed.append("ceilings")
        return gpu.speed.Ceilings(1.0, 1.0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = [{"good": True}, {"good": good}]
    monkeypatch.setattr(gpu, "check_all", lambda device, tiny, keep, part, parts: keep(rows))
    monkeypatch.setattr(gpu, "write_results", lambda output, results, command: None)
    monkeypatch.setattr(gpu.speed, "ceilings", ceilings)
    monkeypatch.setattr(gpu, "time_all", lambda chosen, keep: timed.append("speed"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", "accuracy", "speed"])
    if good:
        gpu.main()
        assert timed == ["ceilings", "speed"]
    else:
        with pytest.raises(SystemExit, match="1 of 2 cases exceed the bound"):
            gpu.main()
        assert not timed


def test_rows_of_the_speed_table_are_chosen_by_subject_and_width(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu: Any = importlib.import_module("gpu")
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "write_results", lambda output, results, command: None)
    monkeypatch.setattr(gpu.speed, "ceilings", lambda: gpu.speed.Ceilings(1.0, 1.0))
    monkeypatch.setattr(gpu, "time_all", lambda rows, keep: chosen.extend(rows))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", "speed", "--peers", "--subjects", "KDA", "--widths", "128"])
    gpu.main()
    assert {row.what for row in chosen} == {"KDA", "KDA, L=2", "KDA, L=4", "fla KDA"}
    assert len(chosen) == 4 * len(gpu.speed_channels.SHAPES)
    assert {row.subject for row in gpu.speed_rows(gpu.speed.Ceilings(1.0, 1.0), True)} == set(gpu.SUBJECTS)
