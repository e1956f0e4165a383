"""How the tests of replayed steps capture them."""

from __future__ import annotations

import pytest


@pytest.fixture
def captured_at_once(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Capture at the first step: as a CUDA graph in tests marked gpu, with the recorder in all others."""
    from prism.models import replay
    from tests.models import recorded

    monkeypatch.setattr(replay, "PATIENCE", 0)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(replay, "record", recorded.record)
