"""The module that is trained: a recommender built from settings and a catalogue, with its loss."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from prism.recommend.config import PrismRecConfig
from prism.recommend.events import Catalogue, RecBatch, Users
from prism.recommend.losses import ItemLoss, item_loss
from prism.recommend.model import PrismForRecommendation
from prism.recommend.settings import LossSettings, RecSettings
from prism.train.model import drawn_start, initialize, rule_options


def build_recommender(settings: RecSettings, catalogue: Catalogue, users: Users) -> PrismForRecommendation:
    """Build the model for the items of a catalogue and the features of users."""
    chosen, features = settings.model, catalogue.features
    config = PrismRecConfig(
        num_items=len(catalogue),
        hidden_size=chosen.hidden_size,
        num_heads=chosen.num_heads,
        layers=chosen.layers,
        num_hidden_layers=chosen.num_hidden_layers,
        # A start that repeats what followed an item before is for text: users seldom do the same things in the same order.
        rule_options=drawn_start(rule_options(chosen), chosen.layers),
        intermediate_size=chosen.intermediate_size,
        dropout=chosen.dropout,
        time_gaps=chosen.time_gaps,
        embedding_scale=chosen.embedding_scale,
        initializer_range=chosen.initializer_range,
        item_features={name: len(feature.values) for name, feature in features.items() if not feature.is_list},
        item_lists={
            name: (len(feature.values), feature.width) for name, feature in features.items() if feature.is_list
        },
        item_vectors=catalogue.vector_sizes,
        user_features={name: (len(feature.values), feature.width) for name, feature in users.features.items()},
        id_dropout=chosen.id_dropout,
        max_length=settings.data.length,
    )
    model = PrismForRecommendation(config)
    if chosen.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


class Learner(nn.Module):
    """A recommender and its loss in one forward pass, so that DDP and FSDP see every parameter that is used."""

    def __init__(self, recommender: PrismForRecommendation, loss: ItemLoss) -> None:
        super().__init__()
        self.recommender, self.item_loss = recommender, loss
        self._no_split_modules = recommender._no_split_modules

    def forward(self, batch: RecBatch) -> Tensor:
        """The loss summed over the real targets. No mask is needed: padding comes last, where no event can see it."""
        model = self.recommender
        gaps = batch.gaps if model.config.time_gaps else None
        out = model(batch.inputs, gaps=gaps, profiles=batch.profiles)
        loss = self.item_loss(out.hidden, model.item_vectors(), batch.targets)
        if self.training and out.balance_loss is not None:
            loss = loss + (batch.targets > 0).sum() * out.balance_loss
        return loss

    def start(self, seed: int, weights: dict[str, Tensor] | None, counts: np.ndarray, catalogue: Catalogue) -> None:
        """Set the initial weights, the item counts and the item features."""
        initialize(self.recommender, seed, weights)
        self.recommender.describe_items(counts, described(catalogue))


def described(catalogue: Catalogue) -> dict[str, np.ndarray]:
    """Codes and vectors of a catalogue's items, as `describe_items` takes them."""
    return {name: feature.of_item for name, feature in catalogue.features.items()} | catalogue.vectors


def make_loss(settings: LossSettings, num_items: int, counts: np.ndarray) -> ItemLoss:
    """The loss of the settings; counts int64 `[num_items + 1]` are the items' training frequencies."""
    return item_loss(
        settings.name,
        num_items,
        negatives=settings.negatives,
        count=settings.count,
        own=settings.own,
        logq=settings.logq,
        t=settings.t,
        counts=counts,
    )
