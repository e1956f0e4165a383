"""SIGKILL in the middle of concurrent appends: what was acknowledged is there once. scripts/serve_kill_test.py kills more."""

from __future__ import annotations

import pytest

from scripts.serve_kill_test import main
from tests.serve.services import Postgres


def test_no_acknowledged_event_is_lost_when_the_service_is_killed() -> None:
    assert main(kills=3, appends=1000) == 0


@pytest.mark.slow
def test_no_acknowledged_event_is_lost_with_postgres(postgres: Postgres) -> None:
    assert main(kills=3, appends=1000, store=postgres.new_database()) == 0
