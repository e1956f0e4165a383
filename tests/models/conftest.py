"""How the tests of captured steps capture them."""

from __future__ import annotations

import pytest


@pytest.fixture
def captured_at_once(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Capture at the first step: as a CUDA graph in tests marked gpu, with the recorder in all others."""
    from prism.engine import cuda_graph
    from prism.models import decode
    from tests.models import recorded

    monkeypatch.setattr(decode, "PATIENCE", 0)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(decode, "captures", lambda ids: True)
        monkeypatch.setattr(decode, "_merged", lambda *_: None)  # as on a GPU
        monkeypatch.setattr(cuda_graph, "capture", recorded.capture)
