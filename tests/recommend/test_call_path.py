"""One `prism recommend` call runs through few files: those that docs/design.md lists, and no others."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

import prism
from prism.cli import main
from prism.recommend import Recommender
from prism.recommend.events import Catalogue
from prism.recommend.saved import Training
from tests.recommend.test_recommender import NAMES, recommender

SOURCE = Path(prism.__file__).parent
CALL = {
    "cli/recommend.py",
    "recommend/recommender.py",
    "recommend/arguments.py",
    "recommend/saved.py",
    "recommend/events/ids.py",
    "recommend/events/histories.py",
    "recommend/reading.py",
    "recommend/results.py",
    "recommend/filters.py",
    "recommend/rerank.py",
    "recommend/top_items.py",
    "recommend/frames.py",
    "models/loading.py",
    "models/recommender.py",
    "files.py",
    "device.py",
    "messages.py",
}
DISPATCH = ("cli/__init__.py", "cli/flags.py")
"""How every command starts: finding it, parsing its flags."""
BACKBONE = ("engine/", "rules/", "nn/", "models/")
"""The backbone and how it is built: these folders, except for the files of CALL. (autoload.py is a hook of `import`.)"""


def files_run(*arguments: str) -> set[str]:
    """The files of prism whose functions are called by a command; what only runs at import does not count."""
    found = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(SOURCE)) and not _importing(frame):
            found.add(Path(path).relative_to(SOURCE).as_posix())

    sys.setprofile(note)
    try:
        assert main(list(arguments)) == 0
    finally:
        sys.setprofile(None)
    return found


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(str(SOURCE)):
            return True
        frame = frame.f_back
    return False


@pytest.mark.parametrize("flags", [("--users", "eve"), ("--sequence", "i1", "i2")])
def test_one_call_runs_through_the_files_of_the_design_page(tmp_path: Path, flags: tuple[str, ...]) -> None:
    it = recommender()
    stored = {"settings": {"data": {}}, "training_data": {"folder": None}}
    training = Training(stored, Catalogue(NAMES), tmp_path)
    Recommender(it.model, it.catalogue, it.users, it.histories, training).save(tmp_path / "saved")
    run = files_run("recommend", str(tmp_path / "saved"), "--device", "cpu", *flags)
    assert {path for path in run if path in CALL or not path.startswith((*BACKBONE, *DISPATCH, "autoload"))} == CALL
    page = (SOURCE.parents[1] / "docs" / "design.md").read_text(encoding="utf-8")
    assert [path for path in CALL if Path(path).name not in page] == []
