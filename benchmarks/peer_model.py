"""Gated DeltaNet by flash-linear-attention, for comparison: its kernel or its layer in our model, and its own whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import prism
from candidates import compile_candidates_together
from prism.engine.layer_ops import Columns
from prism.engine.memory import Engine, Implementation, engine_of, register
from prism.models import PrismForCausalLM
from prism.nn import Block, State
from prism.rules import delta


def fla_model(ours: PrismForCausalLM, head_dim: int) -> nn.Module:
    """Their own model at the sizes of ours, with its fused norms, SwiGLU, convolutions and linear cross-entropy."""
    prepare_fla()
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    sizes = ours.config
    theirs = GatedDeltaNetForCausalLM(
        GatedDeltaNetConfig(
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            head_dim=head_dim,
            expand_v=1.0,  # values as wide as keys
            num_hidden_layers=sizes.num_hidden_layers,
            intermediate_size=sizes.intermediate_size,
            vocab_size=sizes.vocab_size,
            tie_word_embeddings=True,
            fuse_cross_entropy=False,  # one of the two, and this one keeps no logits
            fuse_linear_cross_entropy=True,
            use_cache=False,
        )
    )
    _check_sizes(_size(ours), theirs)
    return theirs


class FlaMixer(nn.Module):
    """Their layer in the place of a `prism.Mixer`, for training: no state goes in or comes out."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        from fla.layers import GatedDeltaNet

        super().__init__()
        self.layer = GatedDeltaNet(width, expand_v=1.0, head_dim=head_dim, num_heads=heads)

    def forward(self, x: Tensor, *_: Any) -> tuple[Tensor, State]:
        return self.layer(x)[0], State()


def with_fla_layers(model: nn.Module, head_dim: int) -> None:
    """Put their layers into our model: projections, convolutions, gates, memory and gated norm are theirs, the rest is ours."""
    prepare_fla()
    count = _size(model)
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        block.mixer = FlaMixer(model.config.hidden_size, model.config.num_heads, head_dim)
    _check_sizes(count, model)


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _check_sizes(ours: int, theirs: nn.Module) -> None:
    if _size(theirs) != ours:
        raise AssertionError(f"the models have {ours} and {_size(theirs)} parameters: they must have equal sizes")


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

    ours, engine = delta.delta_columns, engine_of(prism.Update)
    forms = {"chunkwise": [Implementation(torch.compiler.disable(run), "fla")]}
    register(prism.Update, Engine(forms, lambda update: "chunkwise"))
    delta.delta_columns = unscaled
    try:
        yield
    finally:
        delta.delta_columns = ours
        register(prism.Update, engine)
