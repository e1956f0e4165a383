"""The notebooks in examples/ run: the cells of each in this process, and one (in slow tests all) in a kernel, by nbmake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbmake.nb_run import NotebookRun

import prism

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
IN_A_KERNEL = "one_family"


def cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.fixture(autouse=True)
def _leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prism.rules, "_REGISTERED", dict(prism.rules._REGISTERED))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)


def run(path: Path) -> None:
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(cells(path), 1):
        exec(compile(cell.source, f"{path.name}, cell {number}", "exec"), namespace)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_and_shows_something(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(path)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem == IN_A_KERNEL else pytest.mark.slow) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_in_a_kernel(path: Path) -> None:
    result = NotebookRun(path, default_timeout=120).execute()
    assert result.error is None, result.error and result.error.summary


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path: Path) -> None:
    assert all(not cell.outputs and cell.execution_count is None for cell in cells(path))


def test_there_are_the_four() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["one_family", "probe_a_rule", "train_a_model", "write_a_rule"]


def test_a_cell_that_fails_is_found(tmp_path: Path) -> None:
    path = tmp_path / "broken.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert False")]), path)
    with pytest.raises(AssertionError):
        run(path)
