"""What cannot be served is refused in one sentence; a database or a worker that goes away costs no acknowledged event."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from prism.cli import main
from prism.serve.run import START_SECONDS, bind
from prism.serve.settings import ServerSettings, read_api_key
from tests.children import free_port
from tests.serve.services import Postgres, event, recommender, replayed, serving, until
from tests.serve.test_rec_service import post, recommended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved recommender."""
    path = tmp_path_factory.mktemp("model") / "saved"
    recommender().save(path)
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one sentence with which `prism serve rec` refuses."""
    assert main(["serve", "rec", *map(str, arguments), "--device", "cpu"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("prism serve rec: ") and "Traceback" not in "".join(lines)
    return lines[-1].removeprefix("prism serve rec: ")


def test_a_run_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no model folder" in refused(capsys, tmp_path / "gone", "--port", 0)
    assert "no config.json" in refused(capsys, tmp_path, "--port", 0)


def test_a_port_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refused(capsys, folder, "--port", port) == (
            f"127.0.0.1 port {port} is in use by another process: choose another with --port"
        )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_without_events_is_announced(
    workers: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prism.serve.run.serve", lambda *given: 0)
    monkeypatch.setattr("prism.serve.run.supervise", lambda *given: 0)
    store = tmp_path / "s.db"
    command = ["serve", "rec", str(folder), "--store", str(store), "--port", "0", "--workers", str(workers)]
    assert main([*command, "--device", "cpu"]) == 0
    sentence = "holds no events yet: users of the training data are unknown to it until their events"
    assert sentence in " ".join(capsys.readouterr().err.split())
    with serving(recommender(), store, str(folder)) as client:
        post(client, event("ann", "i1", 1))
    assert main([*command, "--device", "cpu"]) == 0
    assert "holds no events" not in capsys.readouterr().err


def test_a_store_of_another_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(recommender(1), tmp_path / "s.db", "runs/first") as client:
        post(client, event("ann", "i1", 1))
    said = refused(capsys, folder, "--store", tmp_path / "s.db", "--port", 0)
    assert "runs/first" in said and str(folder) in said and "--rebuild" in said
    assert refused(capsys, folder, "--store", tmp_path / "s.db", "--port", 0, "--workers", 2) == said


def test_a_database_that_is_down(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "postgresql://ann:secret@127.0.0.1:1/shop"
    assert main(["serve", "rec", str(folder), "--store", url, "--port", "0", "--wait", "0.6"]) == 2
    said = capsys.readouterr().err
    assert "secret" not in said and "waiting for the store" in said
    last = said.strip().splitlines()[-1]
    assert re.search(r"cannot be opened \(tried for 0.6 s\): .*ann@127.0.0.1:1/shop failed", last), last


def test_events_are_refused_while_the_database_is_down_and_none_is_lost(postgres: Postgres) -> None:
    model, url = recommender(), postgres.new_database()
    with serving(model, url) as client:
        post(client, event("ann", "i1", 1))
        assert client.get("/api/health/ready").status_code == 200
        postgres.stop()
        try:
            answer = client.post("/api/feedback", json=[event("ann", "i2", 2)])
            assert (
                answer.status_code == 503 and "nothing of this request is stored" in answer.json()["error"]["message"]
            )
            assert answer.headers["Retry-After"]
            assert client.get("/api/recommend/ann").status_code == 503
            assert client.get("/api/health/ready").status_code == 503
            assert client.get("/api/health/live").status_code == 200
        finally:
            postgres.start()
        assert post(client, event("ann", "i2", 2)) == 1
        assert recommended(client, "ann") == replayed(model, ["i1", "i2"])
        assert client.get("/api/health/ready").status_code == 200


def test_addresses_and_keys_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="between 0 and 65535"):
        bind(ServerSettings(port=70_000))
    with pytest.raises(ValueError, match="not an address"):
        bind(ServerSettings(host="no.such.host.invalid", port=0))
    assert ServerSettings().warnings() == ServerSettings(host="::1").warnings() == []
    assert len(ServerSettings(host="0.0.0.0").warnings()) == 2
    assert len(ServerSettings(host="0.0.0.0", api_key="12345678").warnings()) == 1
    file = tmp_path / "key"
    file.write_text("a-long-key\n")
    file.chmod(0o600)
    assert read_api_key(file) == "a-long-key"
    file.chmod(0o604)
    with pytest.raises(ValueError, match="chmod 600"):
        read_api_key(file)
    monkeypatch.setenv("PRISM_API_KEY", "short")
    with pytest.raises(ValueError, match="at least 8"):
        read_api_key(None)
    monkeypatch.delenv("PRISM_API_KEY")
    assert read_api_key(None) is None


@pytest.mark.parametrize("flags", [["--workers", "0"], ["--max-body", "0"], ["--log-level", "loud"]])
def test_settings_are_checked(flags: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "must be" in refused(capsys, folder, *flags)


@pytest.mark.parametrize("command", ["serve", "serve rec"])
def test_help_fits_a_screen(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80


def workers_of(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()}


def ended(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
@pytest.mark.parametrize("end", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_worker_that_dies_is_replaced_and_all_end_with_the_supervisor(
    end: signal.Signals, folder: Path, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = ["serve", "rec", str(folder), "--store", str(tmp_path / "s.db"), "--port", str(port), "--device", "cpu"]
    supervisor = subprocess.Popen([sys.executable, "-m", "prism", *command, "--workers", "2"])

    def stored(item: str) -> bool:
        try:
            return post(httpx.Client(base_url=url, timeout=60), event("ann", item, int(item[1:]))) == 1
        except httpx.TransportError:
            return False

    until(lambda: stored("i1"))
    first = workers_of(supervisor.pid)
    assert len(first) == 2
    if end is signal.SIGTERM:
        os.kill(min(first), signal.SIGKILL)
        until(
            lambda: len(workers_of(supervisor.pid) - first) == 1, START_SECONDS / 2
        )  # noticed before its time is over
        until(lambda: stored("i2"))
    workers = workers_of(supervisor.pid)
    os.kill(supervisor.pid, end)
    assert supervisor.wait(60) == (0 if end is signal.SIGTERM else -end)
    until(lambda: all(ended(worker) for worker in workers))
