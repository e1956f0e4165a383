"""Run our Gated DeltaNet model on flash-linear-attention's kernels, for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import prism
from candidates import compile_candidates_together
from prism.engine import dispatch
from prism.engine.fused import Columns
from prism.rules import delta


@contextmanager
def fla_kernels(active: bool) -> Iterator[None]:
    """Run Gated DeltaNet in flash-linear-attention's chunk kernel inside the block.

    Their kernel also normalises queries and keys and scales values, so ours is left out.
    """
    if not active:
        yield
        return
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.TRITON_ABOVE_3_7_1 = True  # for timing only: with this compiler their backward refuses to run on Hopper
    compile_candidates_together()

    def unscaled(mixed: Tensor, beta: Tensor, key_dim: int, *_: Any) -> Columns:
        keys = beta.shape[-1] * key_dim
        q, k, v = (z.unflatten(-1, (beta.shape[-1], -1)) for z in mixed.tensor_split((keys, 2 * keys), -1))
        return Columns(q, k.unsqueeze(3), v.unsqueeze(3))

    def run(update: prism.Update, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return chunk_gated_delta_rule(
            update.q,
            update.k.squeeze(3),
            update.w.squeeze(3),
            update.log_decay,
            update.erase_strength,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    ours, engine = delta.delta_columns, dispatch.engine_of(prism.Update)
    path = dispatch.Path(torch.compiler.disable(run))
    dispatch.register(prism.Update, dispatch.Engine({("chunkwise", "fla"): path}, lambda update: "chunkwise"))
    delta.delta_columns = unscaled
    try:
        yield
    finally:
        delta.delta_columns = ours
        dispatch.register(prism.Update, engine)
