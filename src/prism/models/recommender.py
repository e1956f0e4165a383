"""One recommender for all rules: the language model's backbone over items instead of tokens.

Design choices
- An item has one vector for input and output: the score of the next item is hidden · vector. Features add to that vector.
- Item 0 is padding. It is never a target and never recommended: its score is -inf.
- Data about items that serving needs (their features, how often each occurs) is saved with the weights.
- A forward pass returns its state as a `PrismCache`, like the language model: the next event continues from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

from prism.models.cache import PrismCache
from prism.models.config import PrismRecConfig
from prism.models.language import PrismModel, PrismPreTrainedModel
from prism.rules.parts import at_least_float32

GAP_BUCKETS = 64


@dataclass
class RecommenderOutput(ModelOutput):
    """hidden `[B, T, D]`: the prediction after each event, to be scored against items' vectors."""

    hidden: Tensor | None = None
    past_key_values: PrismCache | None = None
    balance_loss: Tensor | None = None
    """Load-balance loss of mixtures of memories, weighted and summed over layers, to be added to the loss. None without such
    layers."""


class PrismForRecommendation(PrismPreTrainedModel):
    """Histories of items in, scores of the next item out.

    >>> model = PrismForRecommendation(PrismRecConfig(num_items=50, hidden_size=16, layers="prism")).eval()
    >>> hidden = model(torch.tensor([[3, 14, 15], [9, 2, 6]])).hidden
    >>> tuple(model.scores(hidden[:, -1]).shape)
    (2, 51)
    """

    config_class = PrismRecConfig  # type: ignore[assignment]  # narrower than in the base class

    def __init__(self, config: PrismRecConfig) -> None:
        super().__init__(config)
        self.model = PrismModel(config)
        self.dropout = nn.Dropout(config.dropout)
        self.gap_embedding = nn.Embedding(GAP_BUCKETS, config.hidden_size) if config.time_gaps else None
        # By index, not by name: a feature may be called "type" or "a.b", which are not valid names of modules.
        self.feature_embeddings = nn.ModuleList(
            nn.Embedding(count, config.hidden_size) for count in config.item_features.values()
        )
        rows = config.num_items + 1
        self.register_buffer("item_counts", torch.zeros(rows, dtype=torch.int64))
        self.register_buffer("feature_codes", torch.zeros(rows, len(config.item_features), dtype=torch.int64))
        self.item_counts: Tensor
        self.feature_codes: Tensor
        self.post_init()

    @torch.no_grad()
    def describe_items(self, counts: Any = None, features: Mapping[str, Any] | None = None) -> None:
        """Store the counts and features of the items. Call it after the weights are initialised.

        Args:
            counts: `[N + 1]`, how often each item occurs in the training data. It ranks items for users without a history, and
                is the popularity by which negatives are sampled.
            features: `{name: [N + 1]}` codes, one array for each of the configuration's `item_features`.
        """
        if counts is not None:
            self.item_counts.copy_(self._per_item("counts", counts))
        for column, (name, count) in enumerate(self.config.item_features.items()):
            if features is None or name not in features:
                raise ValueError(f"features lacks {name!r}: the configuration's item_features has it")
            codes = self._per_item(f"features[{name!r}]", features[name])
            if int(codes.min()) < 0 or int(codes.max()) >= count:
                raise ValueError(f"features[{name!r}] must have codes 0 … {count - 1}, got up to {int(codes.max())}")
            self.feature_codes[:, column] = codes.to(self.feature_codes.device)

    def _per_item(self, name: str, values: Any) -> Tensor:
        values = torch.as_tensor(values)
        if tuple(values.shape) != (self.config.num_items + 1,) or values.dtype.is_floating_point:
            raise ValueError(
                f"{name} must be integers of shape [num_items + 1] = {[self.config.num_items + 1]}, "
                f"got {values.dtype} {list(values.shape)}"
            )
        return values

    def forward(
        self,
        items: Tensor,
        mask: Tensor | None = None,
        gaps: Tensor | None = None,
        past_key_values: PrismCache | None = None,
        use_cache: bool = False,
    ) -> RecommenderOutput:
        """Predict the next item after every event of histories, or of their continuations.

        Args:
            items: `[B, T]`, 0 is padding.
            mask: `[B, T]` bool, False is padding, at either end or between. It costs time. Every rule is causal: leave it out
                where padding only comes last and no state is needed, as in training.
            gaps: `[B, T]`, time since the previous event in seconds (or in any unit of which 1 is the shortest time that
                matters), 0 for the first event. Required by models with `time_gaps`.
            past_key_values: the cache that an earlier call returned. It is updated in place, like transformers' caches: pass
                a `copy()` to keep it.
            use_cache: whether to return the state after the last event.
        """
        shared: dict[str, Tensor] = {}
        out = self.model(
            inputs_embeds=self.dropout(self._inputs(items, gaps)),
            attention_mask=mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            shared=shared,
        )
        return RecommenderOutput(out.last_hidden_state, out.past_key_values, shared.get("balance_loss"))

    def last_hidden(self, items: Tensor, lengths: Tensor, gaps: Tensor | None = None) -> Tensor:
        """`[B, D]` after the last event of each row of items `[B, T]`; its first `lengths` `[B]` ≥ 1 items are events."""
        # Rules are causal and padding comes last, so no mask is needed.
        hidden = self(items, gaps=gaps).hidden
        return hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1]

    def item_vectors(self) -> Tensor:
        """The items' vectors `[N + 1, D]`, features included; row 0 belongs to padding and is not used."""
        vectors = self.model.embed_tokens.weight
        for column, embedding in enumerate(self.feature_embeddings):
            vectors = vectors + embedding(self.feature_codes[:, column])
        return vectors

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores of all items as the next one: hidden `[…, D]` → `[…, N + 1]`; item 0 is -inf.

        In float32 or better, also in half-precision models: otherwise many items would have equal scores.
        """
        vectors = at_least_float32(self.item_vectors())
        scores = F.linear(hidden.to(vectors.dtype), vectors)
        scores[..., 0] = -torch.inf
        return scores

    def _inputs(self, items: Tensor, gaps: Tensor | None) -> Tensor:
        if items.ndim != 2 or items.dtype.is_floating_point:
            raise ValueError(f"items must be integers of shape [B, T], got {items.dtype} {list(items.shape)}")
        x = self.model.embed_tokens(items)
        for column, embedding in enumerate(self.feature_embeddings):
            x = x + embedding(self.feature_codes[:, column][items])
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        if self.gap_embedding is None:
            return x
        if gaps is None or gaps.shape != items.shape:
            raise ValueError(
                f"gaps must be given as [B, T] = {list(items.shape)}: the model has time_gaps"
                + ("" if gaps is None else f", got {list(gaps.shape)}")
            )
        return x + self.gap_embedding(gap_bucket(gaps))


def gap_bucket(gaps: Tensor) -> Tensor:
    """The bucket of a time gap, two per doubling: 0 for no gap, 63 for all gaps from 2^31.5."""
    return (2 * torch.log2(1 + gaps.double().clamp(min=0))).long().clamp(max=GAP_BUCKETS - 1)
