"""How kernels are compiled and started, with stand-ins for Triton: whatever is interrupted leaves nothing behind."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is for Linux")

from prism.engine.kernels import runtime  # noqa: E402 (it imports Triton)
from prism.engine.kernels.configurations import Tiling  # noqa: E402 (likewise)


class Ready:
    """A compiled kernel."""

    run = None

    def __init__(self) -> None:
        self.starts = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.starts += 1
        return lambda *arguments: None


class Pending:
    """What Triton keeps until a kernel is compiled; it cannot be started."""

    def __init__(self, kernel: Ready) -> None:
        self.kernel = kernel

    def result(self) -> Ready:
        return self.kernel


class Kernel:
    arg_names = ()

    def __init__(self) -> None:
        self.ready = Ready()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: Pending(self.ready)

    def warmup(self, *arguments: Any, **options: Any) -> Pending:
        return Pending(self.ready)


def test_a_kernel_that_was_still_compiling_is_started_like_any_other() -> None:
    kernel = Kernel()
    program = runtime.Program(kernel, {}, Tiling(16))
    for _ in range(3):
        program.start(1)
    assert kernel.ready.starts == 2  # Triton started the first itself


mode: ContextVar[bool] = ContextVar("mode", default=False)


class StaysInItsMode:
    """Triton 3.6: an exception leaves the asynchronous mode on."""

    def __init__(self, threads: Any) -> None:
        self.threads = threads

    def __enter__(self) -> None:
        assert not mode.get(), "another mode is active"
        mode.set(True)

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            mode.set(False)


def test_an_interrupted_compilation_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(triton, "AsyncCompileMode", StaysInItsMode)
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    kind = runtime.Compiled({}, torch.device("cuda", 0))
    program = runtime.Program(Kernel(), {}, Tiling(16))

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kind.compile(interrupted, True)
    assert not mode.get()
    kind.compile(lambda: program.start(1), True)
    assert program.compiled is program.kernel.ready and program.kernel.ready.starts == 0
