"""One recommender for all rules: the language model's backbone over items instead of tokens.

Design choices
- An item has one vector for input and output: the score of the next item is hidden · vector. Features add to that vector:
  embeddings of its values, the mean of those of a list of values, linear maps of given vectors.
- What is known of a user is read before the first event, as if it were an event: a state remembers it, and nothing else
  has to.
- Item 0 is padding. It is never a target and never recommended: its score is -inf.
- Data about items that serving needs (features, given vectors, how often each occurs) is saved with the weights.
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
from prism.models.language import PrismModel, PrismPreTrainedModel
from prism.recommend.config import PrismRecConfig
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
        rows, width = config.num_items + 1, config.hidden_size
        self.register_buffer("item_counts", torch.zeros(rows, dtype=torch.int64))
        self.register_buffer("feature_codes", torch.zeros(rows, len(config.item_features), dtype=torch.int64))
        self.item_counts: Tensor
        self.feature_codes: Tensor
        self.id_dropout = nn.Dropout(config.id_dropout)
        self._kept_ids: Tensor | None = None
        self.list_embeddings = nn.ModuleList(nn.Embedding(count, width) for count, _ in config.item_lists.values())
        self.vector_maps = nn.ModuleList(nn.Linear(size, width, bias=False) for size in config.item_vectors.values())
        self.user_embeddings = nn.ModuleList(nn.Embedding(count, width) for count, _ in config.user_features.values())
        for place, (_, longest) in enumerate(config.item_lists.values()):
            self.register_buffer(f"list_codes_{place}", torch.zeros(rows, longest, dtype=torch.int64))
        for place, size in enumerate(config.item_vectors.values()):
            self.register_buffer(f"given_vectors_{place}", torch.zeros(rows, size))
        self.post_init()

    @torch.no_grad()
    def describe_items(self, counts: Any = None, features: Mapping[str, Any] | None = None) -> None:
        """Store the counts, features and given vectors of the items. Call it after the weights are initialised.

        Args:
            counts: `[N + 1]`, how often each item occurs in the training data. It ranks items for users without a history, and
                is the popularity by which negatives are sampled.
            features: an array for each of the configuration's `item_features` (codes `[N + 1]`), `item_lists` (codes
                `[N + 1, longest list]`, 0 for none) and `item_vectors` (numbers `[N + 1, size]`).
        """
        given, config = features or {}, self.config
        if counts is not None:
            self.item_counts.copy_(self._per_item("counts", counts))
        for kind in ("item_features", "item_lists", "item_vectors"):
            if missing := [name for name in getattr(config, kind) if name not in given]:
                raise ValueError(f"features lacks {missing[0]!r}: the configuration's {kind} has it")
        for column, (name, count) in enumerate(config.item_features.items()):
            self.feature_codes[:, column] = self._codes(name, given[name], count).to(self.feature_codes.device)
        for place, (name, (count, longest)) in enumerate(config.item_lists.items()):
            codes = self._codes(name, given[name], count, longest)
            self.get_buffer(f"list_codes_{place}").copy_(codes)
        for place, (name, size) in enumerate(config.item_vectors.items()):
            vectors = torch.as_tensor(given[name])
            if tuple(vectors.shape) != (config.num_items + 1, size) or not vectors.isfinite().all():
                raise ValueError(
                    f"features[{name!r}] must be finite numbers {[config.num_items + 1, size]}, got {list(vectors.shape)}"
                )
            self.get_buffer(f"given_vectors_{place}").copy_(vectors)

    def _codes(self, name: str, values: Any, count: int, *longest: int) -> Tensor:
        codes = self._per_item(f"features[{name!r}]", values, *longest)
        if int(codes.min()) < 0 or int(codes.max()) >= count:
            raise ValueError(f"features[{name!r}] must have codes 0 … {count - 1}, got up to {int(codes.max())}")
        return codes

    def _per_item(self, name: str, values: Any, *longest: int) -> Tensor:
        values, shape = torch.as_tensor(values), (self.config.num_items + 1, *longest)
        if tuple(values.shape) != shape or values.dtype.is_floating_point:
            longer = ", longest list" if longest else ""
            raise ValueError(
                f"{name} must be integers of shape [num_items + 1{longer}] = {list(shape)}, "
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
        profiles: Tensor | None = None,
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
            profiles: `[B, W]`, codes of the users' features, one column for each value of the configuration's
                `user_features`. They are read first; a continuation has read them. None: nothing is known of the users.
        """
        shared: dict[str, Tensor] = {}
        if self.training and self.config.id_dropout:
            ones = torch.ones(self.config.num_items + 1, 1, device=items.device)
            self._kept_ids = (self.id_dropout(ones) > 0).float()  # for the scores of this pass as well
        inputs = self._inputs(items, gaps)
        profiled = bool(self.config.user_features) and past_key_values is None
        if profiled:
            inputs = torch.cat([self._profile(profiles, items).unsqueeze(1), inputs], 1)
            mask = None if mask is None else torch.cat([mask.new_ones(len(mask), 1), mask], 1)
        out = self.model(
            inputs_embeds=self.dropout(inputs),
            attention_mask=mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            shared=shared,
        )
        hidden = out.last_hidden_state[:, 1:] if profiled else out.last_hidden_state
        return RecommenderOutput(hidden, out.past_key_values, shared.get("balance_loss"))

    def last_hidden(
        self, items: Tensor, lengths: Tensor, gaps: Tensor | None = None, profiles: Tensor | None = None
    ) -> Tensor:
        """`[B, D]` after the last event of each row of items `[B, T]`; its first `lengths` `[B]` ≥ 1 items are events."""
        # Rules are causal and padding comes last, so no mask is needed.
        hidden = self(items, gaps=gaps, profiles=profiles).hidden
        return hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1]

    def item_vectors(self, rows: Tensor | None = None) -> Tensor:
        """The items' vectors, features included: of all items `[N + 1, D]`, or of `rows` `[…]` → `[…, D]`.

        Row 0 belongs to padding and is not used. In training with `id_dropout`, the items that have lost their own embedding
        are those of the last forward pass.
        """

        def of(x: Tensor) -> Tensor:
            return x if rows is None else x[rows]

        vectors = self.model.embed_tokens.weight if rows is None else self.model.embed_tokens(rows)
        if self.training and self._kept_ids is not None:
            vectors = vectors * of(self._kept_ids)
        for column, embedding in enumerate(self.feature_embeddings):
            vectors = vectors + embedding(of(self.feature_codes[:, column]))
        for place, embedding in enumerate(self.list_embeddings):
            vectors = vectors + _mean_embedding(
                embedding.get_parameter("weight"), of(self.get_buffer(f"list_codes_{place}"))
            )
        for place, linear in enumerate(self.vector_maps):
            vectors = vectors + linear(
                of(self.get_buffer(f"given_vectors_{place}")).to(linear.get_parameter("weight").dtype)
            )
        return vectors

    def _profile(self, profiles: Tensor | None, items: Tensor) -> Tensor:
        """The users as an input `[B, D]`."""
        widths = [longest for _, longest in self.config.user_features.values()]
        if profiles is None:
            profiles = items.new_zeros(len(items), sum(widths))
        if tuple(profiles.shape) != (len(items), sum(widths)):
            raise ValueError(f"profiles must be [B, {sum(widths)}] codes of users, got {list(profiles.shape)}")
        parts = zip(self.user_embeddings, profiles.split(widths, 1), strict=True)
        return sum(
            (_mean_embedding(embedding.get_parameter("weight"), codes) for embedding, codes in parts),
            start=torch.zeros(()),
        )

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
        x = self.item_vectors(items)
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


def _mean_embedding(weight: Tensor, codes: Tensor) -> Tensor:
    """The mean embedding of the codes that are not 0, zeros where there is none: weight `[C, D]`, codes `[…, W]` → `[…, D]`."""
    flat = F.embedding_bag(codes.reshape(-1, codes.shape[-1]), weight, mode="mean", padding_idx=0)
    return flat.reshape(*codes.shape[:-1], -1)


def gap_bucket(gaps: Tensor) -> Tensor:
    """The bucket of a time gap, two per doubling: 0 for no gap, 63 for all gaps from 2^31.5."""
    return (2 * torch.log2(1 + gaps.double().clamp(min=0))).long().clamp(max=GAP_BUCKETS - 1)
