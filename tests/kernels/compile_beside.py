"""Compiles the kernels beside the memory for a GPU that need not be here; run by `test_kernels_beside.py`, without Triton's
interpreter, which forgives what the compiler does not."""

from __future__ import annotations

from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from prism.engine.kernels.columns import columns_backward_kernel, columns_kernel
from prism.engine.kernels.solver import solve_backward_kernel, solve_kernel

NUMBERS = {"rows": "i32", "H": "i32", "query_scale": "fp32", "eps": "fp32"}


def compiled(kernel: Any, absent: set[str], **constants: int | bool) -> None:
    """All tensors but the absent ones (and their gradients) are float32."""
    fixed = {name: None for name in kernel.arg_names if name.removeprefix("d_") in absent} | constants
    signature = {name: "constexpr" if name in fixed else NUMBERS.get(name, "*fp32") for name in kernel.arg_names}
    triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32))


SIZES = {"V": 16, "BV": 16, "ROWS": 16}
LATER = {"keys", "u", "p", "betas", "scale"}

for gelu, nonlinear, absent in product((False, True), (False, True), ({"u", "scale"}, {"p"})):
    for kernel in (solve_kernel, solve_backward_kernel):
        compiled(kernel, absent, L=2, **SIZES, GELU=gelu, NONLINEAR=nonlinear)

for later, absent in ((0, LATER), (2, set()), (2, {"keys", "u", "p"})):
    for kernel in (columns_kernel, columns_backward_kernel):
        compiled(kernel, absent, N=later, K=16, BK=16, **SIZES, GELU=True, NONLINEAR=True)
