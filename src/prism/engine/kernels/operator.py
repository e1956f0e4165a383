"""Torch operators, and the shortest way to them.

Torch's way from an operator to its Python code and back takes longer than a small kernel, above all where gradients are
wanted: 0.15 ms of a host's time for forward and backward of one operator, where straight to the code it is 0.06. A call takes
the detour only where something would notice: in compiled code, dispatch modes, function transforms, with tensor subclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prism.engine import compat

Run = Callable[..., Any]


class Operator:
    """`run` as the operator `name`: typed tensors and numbers in, tensors out.

    Args:
        fake: the same with shapes alone.
        keep, differentiate: as `torch.library.register_autograd` takes them; without them there is no gradient.
        run_for_gradient: `run`, and in a tuple what else `keep` may have, which an operator cannot return.
    """

    def __init__(
        self,
        name: str,
        run: Run,
        fake: Run,
        keep: Run | None = None,
        differentiate: Run | None = None,
        run_for_gradient: Run | None = None,
    ) -> None:
        self.run = run
        self.registered = torch.library.custom_op(name, run, mutates_args=())
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
    if compat.have_tangents(*inputs):
        raise NotImplementedError(
            "the kernels have no forward-mode gradient: run it in `with prism.engine.using(backend='torch'):`, which has"
        )
    if torch.compiler.is_compiling() or compat.in_dispatch_mode() or compat.transforms_active(*inputs):
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
