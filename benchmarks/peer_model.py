"""Gated DeltaNet by flash-linear-attention, for comparison: its kernel in our model, and its own whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import prism
from candidates import compile_candidates_together
from prism.engine import dispatch
from prism.engine.fused import Columns
from prism.models import PrismConfig
from prism.rules import delta


def fla_model(ours: PrismConfig, head_dim: int) -> nn.Module:
    """Their own model at the sizes of ours, with its fused norms, SwiGLU, convolutions and linear cross-entropy."""
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    return GatedDeltaNetForCausalLM(
        GatedDeltaNetConfig(
            hidden_size=ours.hidden_size,
            num_heads=ours.num_heads,
            head_dim=head_dim,
            expand_v=1.0,  # values as wide as keys
            num_hidden_layers=ours.num_hidden_layers,
            intermediate_size=ours.intermediate_size,
            vocab_size=ours.vocab_size,
            tie_word_embeddings=True,
            fuse_cross_entropy=False,  # one of the two, and this one keeps no logits
            fuse_linear_cross_entropy=True,
            use_cache=False,
        )
    )


def prepare_fla() -> None:
    """Make flash-linear-attention run here, and its autotuner take seconds instead of minutes."""
    from fla.ops.common import chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True  # for timing only: with this compiler their backward refuses to run on Hopper
    compile_candidates_together()


@contextmanager
def fla_kernels(active: bool) -> Iterator[None]:
    """Run Gated DeltaNet in flash-linear-attention's chunk kernel inside the block.

    Their kernel also normalises queries and keys and scales values, so ours is left out.
    """
    if not active:
        yield
        return
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    prepare_fla()

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
