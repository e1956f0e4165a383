"""Small recommenders behind real HTTP, and private PostgreSQL servers, for the tests of `prism serve`."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from prism.recommend import Recommender
from prism.recommend.config import PrismRecConfig
from prism.recommend.events import Catalogue
from prism.recommend.model import PrismForRecommendation
from prism.serve.metrics import Metrics
from prism.serve.rec.app import rec_app
from prism.serve.rec.service import RecService
from prism.serve.rec.settings import RecSettings, open_store
from prism.serve.run import in_thread
from prism.serve.settings import ServerSettings

ITEMS = 60
PATIENCE = 60.0
"""Seconds until something that must happen is taken not to happen."""


def recommender(seed: int = 0, items: int = ITEMS, **config: Any) -> Recommender:
    """A recommender with random weights, items i1, i2, … and scores further apart than rounding."""
    torch.manual_seed(seed)
    settings = {"hidden_size": 16, "num_heads": 2, "layers": "prism", "max_length": 20, **config}
    model = PrismForRecommendation(PrismRecConfig(num_items=items, **settings)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(50)
        if model.gap_embedding is not None:
            model.gap_embedding.weight.mul_(50)
        for vector in (parameter for parameter in model.parameters() if parameter.ndim == 1):
            vector.add_(0.01 * torch.randn_like(vector))  # as training would: a model is known by its vectors
    model.describe_items(counts=torch.arange(items + 1))
    return Recommender(model, Catalogue([f"i{n}" for n in range(1, items + 1)]))


def replayed(model: Recommender, items: Sequence[str], k: int = 10, times: Sequence[float] | None = None) -> list[str]:
    """What the recommender says after these events, read from the start."""
    known = [item for item in items if model.catalogue.rows([item])[0] > 0]
    states = model.observe(model.start(1), [known], None if times is None else [times])
    return [str(item) for item in model.recommend(states=states, k=k, exclude=[known]).items[0]]


def service(model: Recommender, store: Path | str, name: str = "runs/a", **settings: Any) -> RecService:
    """A service that has not started."""
    choices = RecSettings(str(store), **settings)
    return RecService(model, name, open_store(str(store), 1.0, print), choices, Metrics("events"))


@contextmanager
def serving(
    model: Recommender, store: Path | str, name: str = "runs/a", key: str | None = None, **settings: Any
) -> Iterator[httpx.Client]:
    """A client of a recommender that is served over HTTP by a thread."""
    address = ServerSettings(port=0, api_key=key, max_body=2**20)
    with (
        in_thread(rec_app(service(model, store, name, **settings), address), address) as url,
        httpx.Client(base_url=url, timeout=PATIENCE, headers={} if key is None else {"X-API-Key": key}) as client,
    ):
        yield client


def event(user: str, item: str, second: int | None = None, kind: str = "click", **more: Any) -> dict[str, Any]:
    """An event in Gorse's form, `second` seconds after the start of 2026."""
    when = "" if second is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1767225600 + second))
    return {"FeedbackType": kind, "UserId": user, "ItemId": item, "Timestamp": when, **more}


def until(moment: Any, patience: float = PATIENCE) -> None:
    """Wait for a moment."""
    deadline = time.monotonic() + patience
    while not moment():
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.005)


# Private servers, as far as the machine has them.


def postgres_programs() -> Path | None:
    """The folder of PostgreSQL's programs; None if it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    initdb = shutil.which("initdb")
    return None if initdb is None else Path(initdb).parent


class Postgres:
    """A PostgreSQL server in a temporary folder, reached by a socket in it; it can be stopped and started."""

    def __init__(self, programs: Path) -> None:
        self.programs, self.folder = programs, Path(tempfile.mkdtemp(prefix="prism-postgres-"))
        self._as_user: dict[str, Any] = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            account = pwd.getpwnam("postgres")
            os.chown(self.folder, account.pw_uid, account.pw_gid)
            self._as_user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        self._run("initdb", "-D", str(self.folder / "data"), "-U", "prism", "-A", "trust", "-E", "UTF8", "--no-sync")
        self._databases = 0
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self.programs / program), *arguments]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder, check=False, **self._as_user
        )
        assert done.returncode == 0, done.stdout.decode()

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses='' -c fsync=off -c shared_buffers=8MB"
        self._control("start", "-o", options, "-l", str(self.folder / "log"))

    def stop(self) -> None:
        self._control("stop", "-m", "immediate")

    def _control(self, *arguments: str) -> None:
        # Output to a file: the server inherits it, and a pipe would never be closed.
        with (self.folder / "control.log").open("wb") as output:
            command = [str(self.programs / "pg_ctl"), "-w", "-D", str(self.folder / "data"), *arguments]
            subprocess.run(command, stdout=output, stderr=output, cwd=self.folder, check=True, **self._as_user)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def new_database(self) -> str:
        """The URL of an empty database."""
        import psycopg

        self._databases += 1
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE d{self._databases}")
        return self._url(f"d{self._databases}")

    def _url(self, database: str) -> str:
        return f"postgresql://prism@/{database}?host={self.folder}"
