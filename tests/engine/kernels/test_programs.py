"""Compiling and starting kernels, with stand-ins for Triton: interrupted compilations, and missing private functions."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is for Linux")

from prism.engine.kernels import compat, runtime  # noqa: E402 (they import Triton)
from prism.engine.kernels.memory.configurations import Tiling  # noqa: E402 (likewise)


class Ready:
    """A compiled kernel."""

    run = None

    def __init__(self) -> None:
        self.starts = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.starts += 1
        return lambda *arguments: None


class Pending:
    """A kernel that is still being compiled, which cannot be started."""

    def __init__(self, kernel: Ready) -> None:
        self.kernel = kernel

    def result(self) -> Ready:
        return self.kernel


class Kernel:
    """A kernel whose compilation is pending after every launch."""

    arg_names = ()

    def __init__(self) -> None:
        self.ready = Ready()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: Pending(self.ready)

    def warmup(self, *arguments: Any, **options: Any) -> Pending:
        return Pending(self.ready)


def test_a_pending_kernel_is_waited_for_and_started() -> None:
    kernel = Kernel()
    program = runtime.Program(kernel, {}, Tiling(16))
    for _ in range(3):
        program.start(1)
    assert kernel.ready.starts == 2  # Triton itself started it the first time


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


class Unknown:
    """A result that a later Triton might return from a launch: no compiled kernel that can be started."""


class LaterKernel(Kernel):
    """A kernel without its private attributes."""

    arg_names = None
    warmup = None

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[dict[str, Any]] = []

    @staticmethod
    def fn(x: Any, C: Any, K: Any) -> None: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Unknown:
            self.launches.append({"grid": grid, "arguments": arguments, **options})
            return Unknown()

        return launch


def test_without_private_functions_kernels_start_through_the_public_interface() -> None:
    kernel = LaterKernel()
    program = runtime.Program(kernel, {"K": 16, "C": 32, "OTHER": 1}, Tiling(16, 8, 2))
    for _ in range(2):
        program.start(3, "x")
    assert program.values == (32, 16), "in the order of the signature"
    wanted = {"grid": (3,), "arguments": ("x",), "C": 32, "K": 16, "num_warps": 8, "num_stages": 2}
    assert kernel.launches == [wanted] * 2


@pytest.mark.parametrize("missing", [(triton, "AsyncCompileMode"), (triton.runtime.jit.KernelInterface, "warmup")])
def test_without_asynchronous_compilation_nothing_is_compiled_ahead(
    missing: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.delattr(*missing)
    started = []
    runtime.Compiled({}, torch.device("cuda", 0)).compile(lambda: started.append(1), True)
    assert not started


def test_a_copied_descriptor_equals_a_constructed_one() -> None:
    x = torch.randn(2, 40, 3, 16)
    template = compat.TensorDescriptor(torch.empty(16), [2, 40, 48], [40 * 48, 48, 1], [1, 16, 16])
    copied, built = compat.copied_descriptor(template, x), compat.built_descriptor(template, x)
    assert vars(copied).keys() == vars(built).keys()
    assert all(getattr(copied, name) is getattr(built, name) for name in ("base", "shape", "strides", "block_shape"))
    assert compat.descriptor_on is compat.copied_descriptor, "descriptors of this Triton have no other state"


def test_descriptors_with_other_state_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(compat.TensorDescriptor):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.handle = self.base.data_ptr()

    monkeypatch.setattr(compat, "TensorDescriptor", Later)
    assert not compat._has_only_fields()
    monkeypatch.setattr(compat, "TensorDescriptor", tuple)
    assert not compat._has_only_fields()


def test_a_rehearsal_starts_nothing_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, found = Kernel(), dict[Any, Any]()
    program = runtime.Program(kernel, {}, Tiling(16))
    program.start(1)
    monkeypatch.setattr(runtime._active, "programs", found, raising=False)
    program.start(1)
    assert kernel.ready.starts == 0 and not found


def test_one_process_compiles_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cache_folder", lambda: tmp_path / "cache")
    order, entered = list[str](), threading.Event()

    def second() -> None:
        entered.set()
        with runtime.alone_on_this_machine():
            order.append("second")

    other = threading.Thread(target=second)
    with runtime.alone_on_this_machine():
        other.start()
        assert entered.wait(10)
        other.join(0.2)
        order.append("first")
    other.join(10)
    assert order == ["first", "second"]


def test_without_a_lock_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(compat, "cache_folder", lambda: tmp_path / "file" / "cache")
    with runtime.alone_on_this_machine(), runtime.alone_on_this_machine():
        pass


def test_the_lock_is_where_triton_keeps_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "somewhere")
    assert compat.cache_folder() == Path("somewhere")
