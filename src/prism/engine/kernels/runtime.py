"""How kernels are compiled and started, and how torch reaches them.

**Programs.** Triton inspects every argument of every launch to find out what to run. Here that is known: a kernel's code
depends on its constants alone (dtypes and alignment are guaranteed by the caller, sizes are never compiled in), so a
`Program` goes straight to its compiled code. `compile_together` compiles all programs of an operator on several threads and
starts none of them. `Compiled` holds the programs of one kind of memory.

**Operators.** Torch's path from an operator to its Python code and back takes longer than a small kernel, above all with
gradients: 0.15 ms of host time for forward and backward of one operator, where the direct call takes 0.06. An `Operator` is
registered with torch, and called directly wherever nothing would notice the difference: not in compiled code, dispatch
modes and function transforms, nor with tensor subclasses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from prism.engine import compat as torch_compat
from prism.engine.kernels import compat
from prism.engine.kernels.available import INTERPRETED
from prism.engine.kernels.compat import descriptor_on
from prism.engine.kernels.configurations import Configuration, Tiling

THREADS = 8


class Program:
    """A kernel and its constants."""

    def __init__(self, kernel: Any, constants: dict[str, Any], how: Tiling) -> None:
        self.kernel = kernel
        # A kernel's own constants, in the order of its signature, which is after all other arguments.
        self.constants = {name: constants[name] for name in compat.argument_names(kernel) if name in constants}
        self.options: dict[str, Any] = {"num_warps": how.warps, "num_stages": how.stages}
        if how.registers is not None:
            self.options["maxnreg"] = how.registers
        self.values = tuple(self.constants.values())
        self.compiled: Any = None

    def start(self, count: int, *arguments: Any) -> None:
        """`count` programs. Tensors begin at multiples of 16 bytes."""
        if self.compiled is not None:
            self.compiled[(count, 1, 1)](*arguments, *self.values)
        elif (together := getattr(_active, "programs", None)) is not None:
            if self not in together:
                together[self] = compat.compile_ahead(self.kernel, count, arguments, {**self.constants, **self.options})
        else:  # the interpreter compiles nothing and comes here every time
            self.compiled = compat.startable(self.kernel[(count,)](*arguments, **self.constants, **self.options))


_active = threading.local()


def compile_together(run: Callable[[], None]) -> None:
    """Compile the programs that `run` starts, on several threads, and start none of them."""
    if compat.compiles_ahead():
        # In its own context: Triton 3.6 stays in its asynchronous mode when it is interrupted.
        copy_context().run(_compile_together, run)


def _compile_together(run: Callable[[], None]) -> None:
    device = torch.cuda.current_device()
    found: dict[Program, Any] = {}
    with ThreadPoolExecutor(THREADS, initializer=torch.cuda.set_device, initargs=(device,)) as threads:
        with compat.asynchronous(threads):
            _active.programs = found
            try:
                run()
            finally:
                _active.programs = None
        kernels = [compat.startable(kernel) for kernel in found.values()]
        list(threads.map(compat.build_launcher, kernels))
    for program, compiled in zip(found, kernels, strict=True):
        program.compiled = compiled


@contextmanager
def side_stream(device: torch.device) -> Iterator[Callable[[Tensor], None]]:
    """Run what is started inside in parallel with what follows, until the yielded function is called with its result."""
    if device.type != "cuda":
        yield lambda result: None
        return
    current, side = torch.cuda.current_stream(device), _second_stream(device)

    def join(result: Tensor) -> None:
        current.wait_stream(side)
        result.record_stream(current)  # it was allocated on the other stream

    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield join


@lru_cache(16)
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def rows(z: Tensor | None, count: int, width: int) -> TensorDescriptor | None:
    """`[B, T, …]`, contiguous, cut into tiles of `count` tokens × `width` channels."""
    if z is None:
        return None
    B, T = z.shape[:2]
    return descriptor_on(_rows_template(B, T, z.numel() // (B * T), count, width, z.dtype), z)


def tiles(z: Tensor | None, count: int, width: int) -> TensorDescriptor | None:
    """`[…, R, columns]`, contiguous, as one tall matrix cut into tiles."""
    if z is None:
        return None
    columns = z.shape[-1]
    return descriptor_on(_tiles_template(z.numel() // columns, columns, count, width, z.dtype), z)


@lru_cache(1024)
def _rows_template(B: int, T: int, columns: int, count: int, width: int, dtype: torch.dtype) -> TensorDescriptor:
    return TensorDescriptor(torch.empty(16, dtype=dtype), [B, T, columns], [T * columns, columns, 1], [1, count, width])


@lru_cache(1024)
def _tiles_template(rows: int, columns: int, count: int, width: int, dtype: torch.dtype) -> TensorDescriptor:
    return TensorDescriptor(torch.empty(16, dtype=dtype), [rows, columns], [columns, 1], [count, width])


_compiling = threading.Lock()


class Compiled:
    """The programs for one kind of memory: everything that compiled code depends on is the same for all of them."""

    def __init__(self, constants: dict[str, Any], device: torch.device) -> None:
        self.constants, self.device = constants, device
        self.programs: dict[Any, Program] = {}
        self.together: set[tuple[bool, ...]] = set()

    def program(self, kernel: Any, how: Tiling, constants: dict[str, Any]) -> Program:
        key = (kernel, how, *constants.values())
        found = self.programs.get(key)
        if found is None:
            found = self.programs[key] = Program(kernel, {**self.constants, **constants}, how)
        return found

    def compile(self, run: Callable[[], None], *what: bool) -> None:
        """Compile all that `run` starts at once, the first time that it is called for `what`."""
        if what in self.together or INTERPRETED or self.device.type != "cuda":
            return
        with _compiling:
            if what not in self.together:
                compile_together(run)
                self.together.add(what)


@lru_cache(256)
def compiled(
    K: int, V: int, J: int, dtype: torch.dtype, device: torch.device,
    erases: bool, tied: bool, strength: bool, decay: bool, documents: bool, how: Configuration,
) -> Compiled:  # fmt: skip
    constants = {
        "J": J,
        "K": K,
        "ERASE": erases,
        "TIED": tied,
        "STRENGTH": strength,
        "DECAY": decay,
        "DOCUMENTS": documents,
        # Half precision products run on tensor cores whatever this says; it rules the few that are float32.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
    return Compiled(constants, device)


Run = Callable[..., Any]


class Operator:
    """A Python function as a torch operator: tensors and numbers in, tensors out.

    Args:
        fake: the same with shapes alone.
        keep, differentiate: as `torch.library.register_autograd` takes them; without them there is no gradient.
        run_for_gradient: `run`'s result, and a tuple of what else `keep` takes, which an operator cannot return.
        schema: its arguments and results, where `run`'s own signature does not have them.
    """

    def __init__(
        self,
        name: str,
        run: Run,
        fake: Run,
        keep: Run | None = None,
        differentiate: Run | None = None,
        run_for_gradient: Run | None = None,
        schema: str | None = None,
    ) -> None:
        self.run = run
        self.registered = torch.library.custom_op(name, run, mutates_args=(), schema=schema)
        self.registered.register_fake(fake)
        self.function: type[torch.autograd.Function] | None = None
        if keep is not None and differentiate is not None:
            self.registered.register_autograd(differentiate, setup_context=keep)
            self.function = _function(run_for_gradient or (lambda *inputs: (run(*inputs), ())), keep, differentiate)

    def __call__(self, *inputs: Any) -> Any:
        if _noticed(inputs):
            return self.registered(*inputs)
        if torch.is_grad_enabled() and any(isinstance(z, Tensor) and z.requires_grad for z in inputs):
            return self.registered(*inputs) if self.function is None else self.function.apply(*inputs)
        return self.run(*inputs)


def _noticed(inputs: tuple[Any, ...]) -> bool:
    if torch_compat.have_tangents(*inputs):
        raise NotImplementedError(
            "the kernels have no forward-mode gradient: run it in `with prism.engine.using(backend='torch'):`, which has"
        )
    if torch.compiler.is_compiling() or torch_compat.in_dispatch_mode() or torch_compat.transforms_active(*inputs):
        return True
    return any(isinstance(z, Tensor) and type(z) not in (Tensor, torch.nn.Parameter) for z in inputs)


def _function(run_for_gradient: Run, keep: Run, differentiate: Run) -> type[torch.autograd.Function]:
    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output, more = run_for_gradient(*inputs)
            keep(ctx, inputs, output, *more)
            return output

        @staticmethod
        def backward(ctx: Any, *d_outputs: Tensor | None) -> Any:
            if torch.is_grad_enabled():  # asked with create_graph=True
                raise NotImplementedError(
                    "the kernels have no second derivatives: run the forward pass in "
                    "`with prism.engine.using(backend='torch'):`, which has them"
                )
            return differentiate(ctx, *d_outputs)

    return Direct


def schema_of(fields: type) -> str:
    """The tensors of a named tuple as arguments in an operator's schema: `Tensor q, Tensor? log_decay`."""
    kinds = fields.__annotations__.items()
    return ", ".join(f"Tensor{'?' if 'None' in str(kind) else ''} {name}" for name, kind in kinds)


def contiguous_aligned(z: Tensor | None) -> Tensor | None:
    """z, or a copy of it that is contiguous and aligned as the kernels assume (a view may begin anywhere)."""
    if z is None or (z.is_contiguous() and z.data_ptr() % 16 == 0):
        return z
    return z.clone(memory_format=torch.contiguous_format)


def all_contiguous_aligned(*tensors: Tensor | None) -> list[Any]:
    return [contiguous_aligned(z) for z in tensors]


def present(z: Tensor | None, like: Tensor) -> Tensor:
    """z, or an empty tensor: an operator cannot return None."""
    return like.new_empty(0) if z is None else z


def all_present(tensors: Iterable[Tensor | None], like: Tensor) -> Any:
    """A tuple of tensors, empty ones for None."""
    return tuple(present(z, like) for z in tensors)


def gradient_like(z: Tensor | None, like: Tensor) -> Tensor:
    """The shape of z's gradient in an operator's results."""
    return like.new_empty(0) if z is None else z.new_empty(z.shape)


def only_given(given: Sequence[Tensor | None], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of the tensors that were given; None for the others."""
    return [None if z is None else grad for z, grad in zip(given, grads, strict=True)]
