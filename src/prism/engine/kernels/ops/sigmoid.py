"""σ(x) in few instructions, for kernels that arithmetic limits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from prism.engine.kernels.available import INTERPRETED

_BY_PTX = tl.constexpr(not INTERPRETED and torch.version.hip is None)


@triton.jit
def sigmoid(x):
    """σ(x) of float32, to about 1e-7 of its value; below 1e-38 it is 0.

    `tl.sigmoid` takes three times as many instructions, because it treats subnormal numbers and infinities separately.
    """
    if _BY_PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, e; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.sigmoid(x)
