"""Run an application with uvicorn, in one process or several: bind the port first, stop gracefully, and end with 0 after
SIGTERM or Ctrl-C."""

from __future__ import annotations

import errno
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from prism.files import reason
from prism.messages import say
from prism.serve.logs import log, say_event, set_up_logs
from prism.serve.settings import ServerSettings

AT_ONCE = 0.01
"""Seconds that a server without running requests needs to notice that there are none."""
START_SECONDS = 60
"""Seconds without a sign of life after which a worker is started again: loading libraries must not look like hanging."""


def bind(settings: ServerSettings) -> socket.socket:
    """A socket that is bound to the address, before a model is loaded; ValueError if that is not possible."""
    settings.check()
    where = f"{settings.host} port {settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"host {settings.host!r} is not an address of this machine: {reason(error)}") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(2048)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"{where} is in use by another process: choose another with --port") from error
        raise ValueError(f"{where} cannot be listened on: {reason(error)}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The address of a bound socket as a URL."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server; a signal stops it gracefully, a second one at once, and neither is raised again at the end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        say_event("ready", url=[url_of(one) for one in sockets or []])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig in self._captured_signals:  # once more: do not wait
            self.force_exit = True
        self._captured_signals.append(sig)
        if not self.should_exit:
            say_event("stopping: running requests finish first", signal=signal.Signals(sig).name)
        self.should_exit = True


def make_config(app: FastAPI | Callable[[], FastAPI], settings: ServerSettings, **more: Any) -> uvicorn.Config:
    grace: Any = max(settings.grace, AT_ONCE)  # uvicorn says int and takes any number; None would be no limit
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace,
        timeout_keep_alive=65,
        lifespan="on",
        ws="none",
        **more,
    )


def make_server(app: FastAPI, settings: ServerSettings) -> Server:
    """A server that has not started; tests run it in a thread and set `should_exit`."""
    return Server(make_config(app, settings))


def announce(settings: ServerSettings, bound: socket.socket, name: str) -> None:
    """Say where `name` is served, and what an operator should know."""
    for warning in settings.warnings():
        say(warning)
    say(f"{name} at {url_of(bound)} (page), {url_of(bound)}/docs (API); Ctrl-C stops it")


def serve(app: FastAPI, settings: ServerSettings, bound: socket.socket, name: str, log_level: str = "info") -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code.

    Args:
        bound: from `bind`.
        name: what is served, for the first line.
    """
    set_up_logs(log_level)
    announce(settings, bound, name)
    spare_the_collector()
    server = make_server(app, settings)
    server.run(sockets=[bound])
    say_event("stopped")
    return 0 if server.started else STARTUP_FAILURE


def supervise(
    make_app: Callable[[], FastAPI],
    settings: ServerSettings,
    bound: socket.socket,
    name: str,
    workers: int,
    log_level: str = "info",
) -> int:
    """Serve with several processes until SIGTERM or Ctrl-C; one that dies is started again. Returns the exit code.

    Args:
        make_app: makes the application of a worker; a function of a module, or a `partial` of one. The module should import
            nothing large: a worker gives no sign of life until it is imported.
    """
    set_up_logs(log_level)
    logging.getLogger("uvicorn.error").setLevel(log_level.upper())  # the supervisor says what becomes of its workers
    announce(settings, bound, f"{name}, {workers} workers,")
    config = make_config(
        partial(_worker, make_app, log_level),
        settings,
        factory=True,
        workers=workers,
        timeout_worker_healthcheck=START_SECONDS,
    )
    supervisor = Supervisor(config, [bound])
    supervisor.run()
    return max((STARTUP_FAILURE for one in supervisor.processes if one.exitcode == STARTUP_FAILURE), default=0)


class Supervisor(Multiprocess):
    """Notices at once when a worker is gone.

    A worker answers over a pipe. While the supervisor holds the worker's end of it too, a worker that was killed looks like one
    that is slow to answer, for START_SECONDS, in which no signal is heard either.
    """

    def keep_subprocess_alive(self) -> None:
        for process in self.processes:
            process.child_conn.close()  # the worker has its own
        super().keep_subprocess_alive()


def _worker(make_app: Callable[[], FastAPI], log_level: str) -> FastAPI:
    """The application of a worker, which stops when the supervisor is gone."""
    set_up_logs(log_level)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()
    try:
        app = make_app()
    except Exception as error:
        log.error("a worker cannot start", exc_info=error)
        sys.exit(STARTUP_FAILURE)
    spare_the_collector()
    return app


def spare_the_collector() -> None:
    """Leave what is loaded out of garbage collection, and collect less often.

    A model and its libraries are hundreds of thousands of objects that stay: under load, a fifth of the time went into
    looking through them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@contextmanager
def in_thread(app: FastAPI, settings: ServerSettings) -> Iterator[str]:
    """Serve in a thread of this process, on a free port; yields the URL. For notebooks, benchmarks and tests."""
    bound = bind(settings)
    server = make_server(app, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        thread.join(0.01)
    if not server.started:
        raise RuntimeError("the service did not start: its log says why")
    try:
        yield url_of(bound)
    finally:
        server.should_exit = True
        thread.join()
