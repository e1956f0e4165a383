"""Our SASRec inside RecTools, for recommend.py --same: RecTools' batches, training loop, optimiser and ranking, our layers.

RecTools lets one replace parts of its models. Replaced here is what defines ours: pre-norm layers (RMSNorm, attention with
rotary positions, SwiGLU, no biases, dropout on the residual branches alone), their initial weights, a catalogue of all items,
and a softmax without the padding's row. The layers are written from their equations, with RecTools' own SwiGLU, and
import nothing of ours: `load` gives them the weights of one of our models, `largest_difference` compares the scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rectools.dataset import Dataset
from rectools.models import SASRecModel
from rectools.models.nn.transformers.lightning import TransformerLightningModule
from rectools.models.nn.transformers.net_blocks import SwigluFeedForward, TransformerLayersBase
from rectools.models.nn.transformers.sasrec import SASRecDataPreparator
from torch import Tensor, nn

EPS, BASE, SPREAD = 1e-6, 10_000.0, 0.02


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of x `[B, H, T, K]`: channels i and i + K/2 rotated by t · base^(-2i/K)."""
    steps, width = x.shape[-2:]
    frequencies = BASE ** -(torch.arange(width // 2, dtype=torch.float64, device=x.device) * 2 / width)
    angles = torch.arange(steps, dtype=torch.float64, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., : width // 2], x[..., width // 2 :]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Layer(nn.Module):
    """x + attention(norm x), then x + SwiGLU(norm x)."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width, eps=EPS)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(width, eps=EPS)
        self.feed_forward = SwigluFeedForward(width, hidden, 0.0, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x `[B, T, D]`, mask `[B · heads, T, T]` to be added to the scores of attention."""
        q, k, v = (
            z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        mask = mask.unflatten(0, (-1, self.heads))
        read = F.scaled_dot_product_attention(rotated(q), rotated(k), v, mask).transpose(1, 2).flatten(-2)
        x = x + self.dropout(self.out(read))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Layers(TransformerLayersBase):
    """The stack and its last norm, as RecTools' `transformer_layers_type`."""

    def __init__(self, n_blocks: int, n_factors: int, n_heads: int, dropout_rate: float, hidden: int, **_: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(n_factors, n_heads, hidden, dropout_rate) for _ in range(n_blocks))
        self.norm = nn.RMSNorm(n_factors, eps=EPS)

    def forward(self, seqs: Tensor, timeline_mask: Tensor, attn_mask: Any, key_padding_mask: Any, **_: Any) -> Tensor:
        for layer in self.layers:
            seqs = layer(seqs, attn_mask)
        return self.norm(seqs)


class Training(TransformerLightningModule):
    """RecTools' training with our initial weights, and without the padding among the items of the softmax."""

    start: Any = None
    """Called instead, to set the initial weights."""

    def _xavier_normal_init(self) -> None:
        if self.start is not None:
            return self.start()
        for parameter in self.torch_model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=SPREAD)

    def get_batch_logits(self, batch: dict[str, Tensor]) -> Tensor:
        logits = super().get_batch_logits(batch)
        return logits.index_fill(-1, torch.zeros(1, dtype=torch.int64, device=logits.device), -torch.inf)


class WholeCatalogue(SASRecDataPreparator):
    """RecTools' batches, with all items of the data set in the catalogue: its own has those of the last events alone."""

    def process_dataset_train(self, dataset: Dataset) -> None:
        super().process_dataset_train(dataset)
        trained = self.train_dataset
        self.item_id_map = trained.item_id_map.add_ids(dataset.item_id_map.external_ids)
        self.train_dataset = Dataset(trained.user_id_map, self.item_id_map, trained.interactions)


def same_model(settings: dict[str, Any], common: dict[str, Any]) -> SASRecModel:
    """RecTools' model with our definition."""
    return SASRecModel(
        **common,
        use_pos_emb=False,
        use_key_padding_mask=True,
        transformer_layers_type=Layers,
        transformer_layers_kwargs={"hidden": settings["hidden"]},
        data_preparator_type=WholeCatalogue,
        lightning_module_type=Training,
    )


def load(model: SASRecModel, saved: dict[str, np.ndarray], when: str) -> None:
    """Give a model our weights of recommend.py's file: `when` is first (initial) or last (trained)."""
    weights = {name.removeprefix(f"{when}."): value for name, value in saved.items() if name.startswith(f"{when}.")}
    network = model.torch_model
    row = {name: place for place, name in enumerate(saved["items"], start=1)}
    ours = [row.get(str(name), 0) for name in model.data_preparator.item_id_map.external_ids]  # 0 for the padding
    found = {"item_model.item_net_blocks.0.ids_emb.weight": weights["model.embed_tokens.weight"][ours]}
    found["transformer_layers.norm.weight"] = weights["model.norm.weight"]
    names = {
        "attention_norm": "mixer_norm",
        "qkv": "mixer.rule.qkv",
        "out": "mixer.rule.out",
        "feed_forward_norm": "mlp_norm",
        "feed_forward.ff_linear_1": "mlp.gate",
        "feed_forward.ff_linear_3": "mlp.up",
        "feed_forward.ff_linear_2": "mlp.down",
    }
    for layer in range(len(network.transformer_layers.layers)):
        for theirs, name in names.items():
            found[f"transformer_layers.layers.{layer}.{theirs}.weight"] = weights[f"model.layers.{layer}.{name}.weight"]
    network.load_state_dict({name: torch.from_numpy(value) for name, value in found.items()}, strict=True)


def largest_difference(model: SASRecModel, given: Dataset, users: Any, saved: dict[str, np.ndarray]) -> float:
    """How far the scores of all users and items are from our model's at most, computed in float64."""
    prepared = model.data_preparator.transform_dataset_u2i(given, users)
    model.torch_model.double()
    batches = model.data_preparator.get_dataloader_recommend(prepared, 256)
    hidden, vectors = model.lightning_model._get_user_item_embeddings(batches, "cpu")
    row = {str(name): place for place, name in enumerate(prepared.user_id_map.external_ids)}
    column = {str(name): place for place, name in enumerate(model.data_preparator.item_id_map.external_ids)}
    theirs = (hidden @ vectors.T)[[row[name] for name in saved["users"]]][:, [column[name] for name in saved["items"]]]
    model.torch_model.float()
    return float((theirs - torch.from_numpy(saved["scores"])[:, 1:]).abs().max())
