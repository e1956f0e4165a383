"""Compile and start kernels, and connect them to torch.

**Programs.** Triton inspects every argument of every launch to find the compiled code. Here that is known in advance: a
kernel's code depends on its constants only (the caller guarantees dtypes and alignment, sizes are never compiled in), so a
`Program` starts its compiled code directly. `compile_together` compiles all programs of an operator on several threads and
starts none of them. `Compiled` holds the programs of one kind of memory.

**Operators.** Torch's path from an operator to its Python code and back takes longer than a small kernel, above all with
gradients: 0.15 ms of host time for forward and backward of one operator, compared with 0.06 for the direct call. An
`Operator` is registered with torch, but called directly where the result is the same. It goes through torch in compiled
code, dispatch modes and function transforms, and for tensor subclasses.

**Tensors.** `rows` and `tiles` describe tensors to a kernel. The helpers at the end prepare an operator's inputs and results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from prism.engine import compat as torch_compat
from prism.engine.kernels import compat
from prism.engine.kernels.available import INTERPRETED
from prism.engine.kernels.compat import descriptor_on

if TYPE_CHECKING:
    from prism.engine.kernels.memory.configurations import Configuration, Tiling

THREADS = 16
"""Threads that compile kernels in parallel."""


class Program:
    """A kernel with fixed constants."""

    def __init__(self, kernel: Any, constants: dict[str, Any], tiling: Tiling) -> None:
        self.kernel = kernel
        # Only the constants in the kernel's signature, in its order. They come after all other arguments.
        self.constants = {name: constants[name] for name in compat.argument_names(kernel) if name in constants}
        self.options: dict[str, Any] = {"num_warps": tiling.warps, "num_stages": tiling.stages}
        if tiling.registers is not None:
            self.options["maxnreg"] = tiling.registers
        self.values = tuple(self.constants.values())
        self.compiled: Any = None

    def start(self, count: int, *arguments: Any) -> None:
        """Start `count` program instances. Tensors must begin at multiples of 16 bytes."""
        if (together := getattr(_active, "programs", None)) is not None:
            if self.compiled is None and self not in together:
                together[self] = compat.compile_ahead(self.kernel, count, arguments, {**self.constants, **self.options})
        elif self.compiled is not None:
            self.compiled[(count, 1, 1)](*arguments, *self.values)
        else:  # the first start; in the interpreter, which compiles nothing, every start
            self.compiled = compat.startable(self.kernel[(count,)](*arguments, **self.constants, **self.options))


_active = threading.local()


def compile_together(run: Callable[[], None]) -> None:
    """Compile the programs that `run` starts, on several threads, and start none of them."""
    if compat.compiles_ahead():
        # In a separate context: Triton 3.6 stays in its asynchronous mode when it is interrupted.
        with alone_on_this_machine():
            copy_context().run(_compile_together, run)


@contextmanager
def alone_on_this_machine() -> Iterator[None]:
    """Wait until no other process with the same cache compiles.

    Processes that start together would all compile the same kernels, and replace each other's files in Triton's cache. One of
    twelve was seen to start a kernel with the launcher of another. The likely cause: Python knows loaded libraries by their
    inodes, and that of a replaced file is used again. Where files cannot be locked, nothing waits.
    """
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl

            folder = compat.cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / "prism.lock").open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield


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
    """Start work on a second stream, in parallel with the code after the block.

    Yields a function that must be called with the result: it makes the current stream wait for it.
    """
    if device.type != "cuda":
        yield lambda result: None
        return
    current, side = torch.cuda.current_stream(device), _second_stream(device)

    def join(result: Tensor) -> None:
        current.wait_stream(side)
        result.record_stream(current)  # allocated on the other stream

    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield join


@lru_cache(16)
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def rows(z: Tensor | None, count: int, width: int) -> TensorDescriptor | None:
    """A descriptor of a contiguous `[B, T, …]` in tiles of `count` tokens × `width` channels."""
    if z is None:
        return None
    B, T = z.shape[:2]
    return descriptor_on(_rows_template(B, T, z.numel() // (B * T), count, width, z.dtype), z)


def tiles(z: Tensor | None, count: int, width: int) -> TensorDescriptor | None:
    """A descriptor of a contiguous `[…, R, columns]`, seen as one tall matrix, in tiles of `count` rows × `width` columns."""
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
    """The programs of one kind of memory, and the constants that its kernels share."""

    def __init__(self, constants: dict[str, Any], device: torch.device) -> None:
        self.constants, self.device = constants, device
        self.programs: dict[Any, Program] = {}
        self.compiled_kinds: set[tuple[bool, ...]] = set()

    def program(self, kernel: Any, tiling: Tiling, constants: dict[str, Any]) -> Program:
        """The program of a kernel; `constants` are those that it does not share with the others."""
        key = (kernel, tiling, *constants.values())
        found = self.programs.get(key)
        if found is None:
            found = self.programs[key] = Program(kernel, {**self.constants, **constants}, tiling)
        return found

    def compile(self, run: Callable[[], None], *kind: bool) -> None:
        """Compile everything that `run` starts in parallel, at the first call for this `kind`."""
        if kind in self.compiled_kinds or INTERPRETED or self.device.type != "cuda":
            return
        with _compiling:
            if kind not in self.compiled_kinds:
                compile_together(run)
                self.compiled_kinds.add(kind)


@lru_cache(256)
def compiled(
    K: int, V: int, J: int, dtype: torch.dtype, device: torch.device,
    erases: bool, tied: bool, strength: bool, decay: bool, documents: bool, group: int, substeps: int, how: Configuration,
) -> Compiled:  # fmt: skip
    """The programs for these sizes, options and tile sizes (`how`), one object per combination."""
    constants = {
        "J": J,
        "K": K,
        "ERASE": erases,
        "TIED": tied,
        "STRENGTH": strength,
        "DECAY": decay,
        "DOCUMENTS": documents,
        "GROUP": group,
        "SUBSTEPS": substeps,
        # Only for the few float32 products: half-precision products run on tensor cores in any case.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
    return Compiled(constants, device)


Run = Callable[..., Any]


class Operator:
    """A Python function as a torch operator: tensors and numbers in, tensors out.

    Args:
        name: the operator's name in torch, `prism::…`.
        run: computes the result.
        fake: the same on fake tensors: shapes and dtypes only.
        setup_context, differentiate: as `torch.library.register_autograd` takes them; without them there is no gradient.
        run_for_gradient: returns `run`'s result, and a tuple of further arguments of `setup_context` that an operator cannot
            return.
        run_without_gradient: returns the first results of `run` where a direct call needs no gradient.
        schema: arguments and results, where the signature of `run` does not have them.
    """

    def __init__(
        self,
        name: str,
        run: Run,
        fake: Run,
        setup_context: Run | None = None,
        differentiate: Run | None = None,
        run_for_gradient: Run | None = None,
        run_without_gradient: Run | None = None,
        schema: str | None = None,
    ) -> None:
        self.run = run_without_gradient or run
        self.registered = torch.library.custom_op(name, run, mutates_args=(), schema=schema)
        self.registered.register_fake(fake)
        self.function: type[torch.autograd.Function] | None = None
        if setup_context is not None and differentiate is not None:
            self.registered.register_autograd(differentiate, setup_context=setup_context)
            run_for_gradient = run_for_gradient or (lambda *inputs: (run(*inputs), ()))
            self.function = _autograd_function(run_for_gradient, setup_context, differentiate)

    def __call__(self, *inputs: Any) -> Any:
        if _needs_torch(inputs):
            return self.registered(*inputs)
        if torch.is_grad_enabled() and any(isinstance(z, Tensor) and z.requires_grad for z in inputs):
            return self.registered(*inputs) if self.function is None else self.function.apply(*inputs)
        return self.run(*inputs)


def _needs_torch(inputs: tuple[Any, ...]) -> bool:
    """Whether a call must go through torch's registration, because something else watches or transforms it."""
    if torch_compat.have_tangents(*inputs):
        raise NotImplementedError(
            "the Triton kernels do not support forward-mode gradients: run the call in "
            "`with prism.engine.using(backend='torch'):`, which does"
        )
    if torch.compiler.is_compiling() or torch_compat.in_dispatch_mode() or torch_compat.transforms_active(*inputs):
        return True
    return any(isinstance(z, Tensor) and type(z) not in (Tensor, torch.nn.Parameter) for z in inputs)


def _autograd_function(run_for_gradient: Run, setup_context: Run, differentiate: Run) -> type[torch.autograd.Function]:
    """The same gradient as the registered operator's, without torch's operator machinery."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output, more = run_for_gradient(*inputs)
            setup_context(ctx, inputs, output, *more)
            return output

        @staticmethod
        def backward(ctx: Any, *d_outputs: Tensor | None) -> Any:
            if torch.is_grad_enabled():  # create_graph=True
                raise NotImplementedError(
                    "the Triton kernels have no second derivatives: run the forward pass in "
                    "`with prism.engine.using(backend='torch'):`, which has them"
                )
            return differentiate(ctx, *d_outputs)

    return Direct


def schema_of(fields: type) -> str:
    """The fields of a named tuple of tensors as arguments in an operator's schema: `Tensor q, Tensor? log_decay`."""
    kinds = fields.__annotations__.items()
    return ", ".join(f"Tensor{'?' if 'None' in str(kind) else ''} {name}" for name, kind in kinds)


def contiguous_aligned(z: Tensor | None) -> Tensor | None:
    """z, or a contiguous copy aligned to 16 bytes as the kernels assume (a view may begin at any address)."""
    if z is None or (z.is_contiguous() and z.data_ptr() % 16 == 0):
        return z
    return z.clone(memory_format=torch.contiguous_format)


def all_contiguous_aligned(*tensors: Tensor | None) -> list[Any]:
    return [contiguous_aligned(z) for z in tensors]


def present(z: Tensor | None, like: Tensor) -> Tensor:
    """z, or an empty tensor in place of None, which an operator cannot return."""
    return like.new_empty(0) if z is None else z


def all_present(tensors: Iterable[Tensor | None], like: Tensor) -> Any:
    """A tuple of these tensors, with empty ones in place of None."""
    return tuple(present(z, like) for z in tensors)


def gradient_like(z: Tensor | None, like: Tensor) -> Tensor:
    """An empty tensor like z's gradient in an operator's results, for fake tensors."""
    return like.new_empty(0) if z is None else z.new_empty(z.shape)


def only_given(given: Sequence[Tensor | None], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of the tensors that are not None, and None for the others."""
    return [None if z is None else grad for z, grad in zip(given, grads, strict=True)]
