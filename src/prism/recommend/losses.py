"""Losses of the recommender over all items or over sampled negatives, and the samplers of negatives.

The cross-entropy over all items, as over a vocabulary, is `linear_cross_entropy` in cross_entropy.py.

Every loss takes hidden `[…, D]`, the items' vectors `[N + 1, D]` and the targets `[…]` (0: none). It returns the SUM over
real targets, in float32 or better; the caller divides by their number. Under `torch.autocast` products are in its dtype,
sums are not.

    full_softmax      -log p(target), with p over all items; exact, and the strongest where the catalogue is small enough
    sampled_softmax   the same over the target and sampled negatives, each weighted by logQ correction
    bce               binary cross-entropy of the target and sampled negatives
    gbce              bce corrected for overconfidence due to negative sampling (gSASRec, Petrov and Macdonald, 2023)

Samplers draw with replacement from torch's global random generator of the targets' device, so that saving and restoring its
state resumes exactly. A target may be drawn as its own negative; the losses ignore it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine.inputs import values_may_be_read
from prism.models.cross_entropy import linear_cross_entropy
from prism.rules.parts import at_least_float32


class Negatives(NamedTuple):
    """Sampled negatives for M targets."""

    items: Tensor
    """`[S]`, shared by all targets (scores are then one matrix product), or `[M, S]`, separate for each target."""
    log_expected: Tensor | None
    """Same shape as `items`: the log of the expected number of draws of each, S · q. None: no correction."""


class Sampler(Protocol):
    """Samples negatives for targets."""

    def draw(self, targets: Tensor, count: int, own: bool = False) -> Negatives:
        """`count` negatives for targets `[M]` (0: none), on their device; with `own` separate ones for each target."""
        ...


class Uniform:
    """Samples all items with equal probability."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def draw(self, targets: Tensor, count: int, own: bool = False) -> Negatives:
        items = torch.randint(1, self.num_items + 1, _shape(targets, count, own), device=targets.device)
        return Negatives(items, torch.full(items.shape, math.log(count / self.num_items), device=items.device))


class Popularity:
    """Samples items in proportion to how often they occur in the training data, `counts` `[N + 1]`, to the power `power`.

    Items that do not occur are never drawn.
    """

    def __init__(self, counts: Any, power: float = 1.0) -> None:
        weights = torch.as_tensor(counts).double() ** power
        weights[0] = 0.0
        if not bool((weights[1:] > 0).any()):
            raise ValueError("counts must be how often each item occurs, [N + 1], with a positive one: all are 0")
        weights[torch.as_tensor(counts) == 0] = 0.0  # with power 0 they would be 1
        self.share = weights / weights.sum()
        self.cumulative = self.share.cumsum(0)

    def draw(self, targets: Tensor, count: int, own: bool = False) -> Negatives:
        self._move(targets.device)
        at = torch.rand(_shape(targets, count, own), dtype=torch.float64, device=targets.device)
        # Strictly less than the last sum despite rounding; `right` skips items that do not occur.
        items = torch.searchsorted(self.cumulative, at * (self.cumulative[-1] * (1 - 1e-15)), right=True)
        return Negatives(items, self.log_expected(items, count))

    def log_expected(self, items: Tensor, count: int) -> Tensor:
        return (self.share[items] * count).log().float()

    def _move(self, device: torch.device) -> None:
        if self.share.device != device:
            self.share, self.cumulative = self.share.to(device), self.cumulative.to(device)


class InBatch(Popularity):
    """Samples targets of the batch. They occur by popularity, `counts` `[N + 1]`, from which the logQ correction follows."""

    def __init__(self, counts: Any) -> None:
        super().__init__(counts)

    def draw(self, targets: Tensor, count: int, own: bool = False) -> Negatives:
        self._move(targets.device)
        shape = _shape(targets, count, own)
        picked = torch.multinomial((targets > 0).float(), math.prod(shape), replacement=True)
        items = targets[picked].reshape(shape)
        return Negatives(items, self.log_expected(items, count))


SAMPLERS = ("uniform", "popularity", "in_batch")


def sampler(name: str, num_items: int, counts: Any = None) -> Sampler:
    """A sampler by name. All but `uniform` need `counts` `[N + 1]`, how often each item occurs."""
    if name not in SAMPLERS:
        raise ValueError(f"unknown negatives {name!r}: choose from {', '.join(SAMPLERS)}")
    if name == "uniform":
        return Uniform(num_items)
    if counts is None:
        raise ValueError(f"negatives {name!r} need counts, how often each item occurs")
    return Popularity(counts) if name == "popularity" else InBatch(counts)


def _shape(targets: Tensor, count: int, own: bool) -> tuple[int, ...]:
    if count < 1:
        raise ValueError(f"the number of negatives must be at least 1, got {count}")
    return (targets.numel(), count) if own else (count,)


LOSSES = ("full_softmax", "sampled_softmax", "bce", "gbce")
ItemLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden, vectors, targets) → the sum over real targets."""


def item_loss(
    name: str,
    num_items: int,
    *,
    negatives: str = "uniform",
    count: int = 256,
    own: bool = False,
    logq: bool = True,
    t: float = 0.75,
    counts: Any = None,
) -> ItemLoss:
    """A loss by name. Losses with negatives (all but `full_softmax`) draw new ones at every call.

    Args:
        negatives: how negatives are sampled, one of `SAMPLERS`.
        counts: `[N + 1]`, how often each item occurs; needed by the samplers other than `uniform`.
        count: number of negatives.
        own: whether each target has separate negatives instead of sharing one set.
        logq: whether `sampled_softmax` applies the logQ correction.
        t: the calibration parameter of `gbce`.
    """
    if name == "full_softmax":
        return full_softmax
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}: choose from {', '.join(LOSSES)}")
    drawn_from = sampler(negatives, num_items, counts)

    def loss(hidden: Tensor, vectors: Tensor, targets: Tensor) -> Tensor:
        hidden, targets = flatten_rows(hidden, targets)
        if not targets.numel():
            return hidden.sum(dtype=torch.float32)
        drawn = drawn_from.draw(targets, count, own)
        if name == "sampled_softmax":
            return sampled_softmax(hidden, vectors, targets, drawn if logq else Negatives(drawn.items, None))
        return bce(hidden, vectors, targets, drawn) if name == "bce" else gbce(hidden, vectors, targets, drawn, t=t)

    return loss


def full_softmax(hidden: Tensor, vectors: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
    """Σ -log softmax(hidden · vectors)[target] over items 1 … N: `linear_cross_entropy`, `chunk` rows at a time."""
    hidden, targets = flatten_rows(hidden, targets)
    return linear_cross_entropy(  # item i is output i - 1
        hidden, vectors[1:], targets - 1, ignore_index=-1, reduction="sum", rows=chunk
    )


def sampled_softmax(hidden: Tensor, vectors: Tensor, targets: Tensor, negatives: Negatives) -> Tensor:
    """Σ -log(e^s₊ / (e^s₊ + Σ_j e^{s_j} / expected_j)) over the negatives j that are not the target.

    With `log_expected` the sum over negatives is an unbiased estimate of the sum over all items except the target. The target
    is always included, so it is not corrected.
    """
    positive, negative, is_target = _scores(hidden, vectors, targets, negatives.items)
    if negatives.log_expected is not None:
        negative = negative - negatives.log_expected
    negative = negative.masked_fill(is_target, -torch.inf)
    losses = torch.cat([positive.unsqueeze(-1), negative], -1).logsumexp(-1) - positive
    return torch.where(targets.flatten() > 0, losses, 0.0).sum()


def bce(hidden: Tensor, vectors: Tensor, targets: Tensor, negatives: Negatives, power: float = 1.0) -> Tensor:
    """Σ (-power · log σ(s₊) - Σ_j log σ(-s_j)) / (1 + number of negatives) over the negatives j that are not the target."""
    positive, negative, is_target = _scores(hidden, vectors, targets, negatives.items)
    log_rejected = F.logsigmoid(-negative).masked_fill(is_target, 0.0)
    losses = -(power * F.logsigmoid(positive) + log_rejected.sum(-1)) / (1 + negatives.items.shape[-1])
    return torch.where(targets.flatten() > 0, losses, 0.0).sum()


def gbce(hidden: Tensor, vectors: Tensor, targets: Tensor, negatives: Negatives, t: float = 0.75) -> Tensor:
    """`bce` with the power β = α (t (1 - 1/α) + 1/α), where α is the fraction of all other items that are negatives.

    t = 0 is `bce`; t = 1 makes σ(s) the probability that training on all items would give.
    """
    if not 0 <= t <= 1:
        raise ValueError(f"t must be between 0 and 1, got {t}")
    alpha = min(1.0, negatives.items.shape[-1] / max(1, vectors.shape[0] - 2))
    return bce(hidden, vectors, targets, negatives, power=t * (alpha - 1) + 1)


def flatten_rows(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten hidden `[…, D]` and targets `[…]` to `[M, D]`, `[M]`.

    Rows without a target are dropped if that needs no synchronisation with the device.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"targets must be {list(hidden.shape[:-1])} like hidden's rows, got {list(targets.shape)}")
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    if values_may_be_read(targets):
        rows = targets.nonzero().squeeze(1)
        if len(rows) < len(targets):
            return hidden[rows], targets[rows]
    return hidden, targets


def _scores(hidden: Tensor, vectors: Tensor, targets: Tensor, items: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of targets `[M]` and of negatives `[M, S]`, and bool `[M, S]`, which negatives are the target."""
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    positive = (at_least_float32(hidden) * F.embedding(targets, vectors)).sum(-1)
    chosen = F.embedding(items, vectors).to(hidden.dtype)
    negative = F.linear(hidden, chosen) if items.ndim == 1 else (chosen @ hidden.unsqueeze(-1)).squeeze(-1)
    return positive, at_least_float32(negative), items == targets.unsqueeze(-1)
