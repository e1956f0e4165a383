"""Stores that every test of the service can have: SQLite always, PostgreSQL and Redis where they are installed."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.serve.services import Postgres, RedisServer

INSTALL = "`.ci/run` installs it where it is root and has apt"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A private PostgreSQL server."""
    from tests.serve.services import Postgres, postgres_programs

    programs = postgres_programs()
    if programs is None:
        pytest.skip(f"PostgreSQL is not installed: {INSTALL}")
    if os.geteuid() == 0 and "postgres" not in [account.pw_name for account in pwd.getpwall()]:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    server = Postgres(programs)
    yield server
    server.remove()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A private Redis server."""
    from tests.serve.services import RedisServer

    program = shutil.which("redis-server")
    if program is None:
        pytest.skip(f"Redis is not installed: {INSTALL}")
    server = RedisServer(program)
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store, of both kinds."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()
