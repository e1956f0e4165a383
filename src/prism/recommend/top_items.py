"""The k best items of each user, found in slices of the catalogue: the scores of all items are never in memory together.

The definition is `top_k` with a mask, over all scores. `best_rows` gives the same items for any number of them:

- Scores of a slice are one matrix product in float32.
- Items to leave out are pairs of user and item, which are few: they are set to -inf where they are, without a mask.
- Of a slice only the k best survive. They lie in the k blocks with the largest maxima, so most scores are read once.
- Of equal scores the lower row comes first, so that a short list is the start of a longer one and pages fit together.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prism.recommend.filters import Excluded
from prism.recommend.model import PrismForRecommendation
from prism.recommend.ranking import SCORES_AT_ONCE
from prism.rules.parts import at_least_float32

USERS_AT_ONCE = 256
SLICE = 2**22
"""Scores of a slice on a CPU (users × items): 16 MiB stay in the cache between the product and the search."""
NO_COUNTS = "a user without events gets the most popular items, but the model has no item counts: call describe_items"


def best_items(
    model: PrismForRecommendation,
    hidden: Tensor,
    events: Tensor,
    excluded: Excluded,
    k: int,
    allowed: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k best items of n users: rows of the catalogue int64 and scores float32, `[n, k]`; row 0 where none is left.

    Args:
        hidden: `[n, D]`, the model's output after each user's last event.
        events: `[n]`, number of events of each user; a user without events gets the most popular items.
        allowed: rows of the catalogue to choose from, ascending. None: all.
    """
    choice = np.arange(1, model.config.num_items + 1) if allowed is None else allowed
    width = min(k, len(choice))
    rows, scores = np.zeros((len(hidden), width), np.int64), np.full((len(hidden), width), -np.inf, np.float32)
    active = (events > 0).cpu().numpy()
    if active.any():
        vectors = at_least_float32(model.item_vectors())
        vectors = vectors[1:] if allowed is None else vectors[torch.from_numpy(choice).to(vectors.device)]
        picked = torch.from_numpy(np.flatnonzero(active)).to(hidden.device)
        found = best_rows(vectors, hidden[picked], excluded.of(active).among(choice), width)
        rows[active], scores[active] = np.concatenate([[0], choice])[found[0] + 1], found[1]
    if not active.all():
        if not bool(model.item_counts.any()):
            raise ValueError(NO_COUNTS)
        counts = model.item_counts.cpu().numpy()
        rows[~active], scores[~active] = most_popular(counts, excluded.of(~active), choice, width)
    return rows, scores


def item_scores(model: PrismForRecommendation, hidden: Tensor, events: Tensor) -> Tensor:
    """Scores of all items, `[n, N + 1]`, for `hidden` `[n, D]`; by popularity for users without events."""
    scores = model.scores(hidden)
    if bool((events > 0).all()):
        return scores
    if not bool(model.item_counts.any()):
        raise ValueError(NO_COUNTS)
    counts = model.item_counts.float()
    return torch.where((events > 0)[:, None], scores, counts.log1p() - counts[1:].sum().log1p())


def similar_rows(
    model: PrismForRecommendation, asked: np.ndarray, k: int, allowed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The k items with the largest cosine to each of the items `asked` `[n]`, itself left out: rows and cosines, `[n, k]`."""
    choice = np.arange(1, model.config.num_items + 1) if allowed is None else allowed
    vectors = unit(model.item_vectors())
    queries = vectors[torch.from_numpy(asked).to(vectors.device)]
    itself = Excluded(len(asked), np.arange(len(asked)), asked).among(choice)
    vectors = vectors[1:] if allowed is None else vectors[torch.from_numpy(choice).to(vectors.device)]
    found, cosines = best_rows(vectors, queries, itself, min(k, len(choice)))
    return np.concatenate([[0], choice])[found + 1], cosines


def unit(vectors: Tensor) -> Tensor:
    """Vectors of length 1; zeros stay zeros."""
    return torch.nn.functional.normalize(at_least_float32(vectors), dim=-1)


def best_rows(vectors: Tensor, hidden: Tensor, excluded: Excluded, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest products of each row of hidden `[n, D]` with vectors `[N, D]`: rows of vectors and values, `[n, k]`.

    -1 and -inf where fewer than k products are above -inf; NaN counts as -inf.

    Args:
        excluded: pairs of a row of hidden and a row of vectors.
    """
    rows, scores = np.empty((len(hidden), k), np.int64), np.empty((len(hidden), k), np.float32)
    users = max(1, min(USERS_AT_ONCE, SLICE // max(1, k)))
    width = max(1, (SLICE if vectors.device.type == "cpu" else SCORES_AT_ONCE) // users)
    for start in range(0, len(hidden), users):
        part = slice(start, start + users)
        mine = hidden[part].to(vectors.dtype)
        unwanted = excluded.part(start, start + len(mine)).by_item()
        best = mine.new_full((len(mine), k), -torch.inf)
        found = torch.full(best.shape, -1, dtype=torch.int64, device=best.device)
        for first in range(0, len(vectors), width):
            products = mine @ vectors[first : first + width].T
            for_users, for_items = unwanted.items_between(first, first + width)
            products[
                torch.from_numpy(for_users).to(best.device), torch.from_numpy(for_items - first).to(best.device)
            ] = -torch.inf
            values, places = largest(products, k)
            best, order = _topk(torch.cat([best, values], 1), k)  # of equal ones those of earlier slices stand first
            found = torch.cat([found, places + first], 1).gather(1, order)
        rows[part], scores[part] = found.masked_fill(best == -torch.inf, -1).cpu().numpy(), best.cpu().numpy()
    return rows, scores


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row and their places, `[B, k]`; of equal ones the first. NaN counts as -inf.

    With blocks of b values, the k largest are in the k blocks with the largest maxima (of equal ones the first): it is enough
    to sort N / b maxima and k · b values.
    """
    many = values.shape[1]
    k = min(k, many)
    block = 1 << max(0, int(np.log2(max(1, many / k)) / 2))  # the power of two below the root of N / k
    if block < 4:
        return _topk(_no_nan(values), k)
    whole = many // block * block
    blocks = values[:, :whole].unflatten(1, (-1, block))
    maxima = blocks.amax(2)
    if bool(maxima.isnan().any()):  # a maximum with NaN is NaN
        return _topk(_no_nan(values), k)
    chosen = _topk(maxima, k)[1].sort(1).values  # so that equal values stay in their order
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, block)).flatten(1)
    places = (chosen[:, :, None] * block + torch.arange(block, device=values.device)).flatten(1)
    if whole < many:
        rest = torch.arange(whole, many, device=values.device).expand(len(values), -1)
        inside, places = torch.cat([inside, _no_nan(values[:, whole:])], 1), torch.cat([places, rest], 1)
    best, order = _topk(inside, k)
    return best, places.gather(1, order)


def _no_nan(values: Tensor) -> Tensor:
    return values.masked_fill(values.isnan(), -torch.inf)


def _topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `topk` for values `[B, N]` without NaN, but of equal values the first ones, in their order.

    `topk` takes any of equal values. Only rows where the value after the k largest is equal to the last of them are read
    again.
    """
    best, places = values.topk(min(k + 1, values.shape[1]), dim=1)
    same = (best[:, 1:] == best[:, :-1]) & (best[:, 1:] > -torch.inf)
    if not bool(same.any()):
        return best[:, :k], places[:, :k]
    open_end = same[:, k - 1] if same.shape[1] == k else same.new_zeros(len(same))
    best, places = best[:, :k], places[:, :k].contiguous()
    if bool(open_end.any()):
        rows = open_end.nonzero()[:, 0]
        last, every = best[rows, -1:], torch.arange(values.shape[1], device=values.device)
        equal = torch.where(values[rows] == last, every, values.shape[1]).topk(k, dim=1, largest=False).values
        larger = (best[rows] > last).sum(1, keepdim=True)
        nth = (every[:k] - larger).clamp(min=0)
        places[rows] = torch.where(every[:k] < larger, places[rows], equal.sort(1).values.gather(1, nth))
    places = places.sort(1).values
    best, order = values.gather(1, places).sort(dim=1, descending=True, stable=True)
    return best, places.gather(1, order)


def top_k(scores: Tensor, candidate_mask: Tensor, k: int) -> Tensor:
    """The k best items of each row, best first, int64 `[B, k]`; 0 where fewer than k candidates have a score above -inf.

    Scores of other items become -inf in place: a copy for a million items would take longer than the search.
    """
    values, places = largest(scores.masked_fill_(~candidate_mask, -torch.inf), min(k, scores.shape[1] - 1))
    return places * (values > -torch.inf)


def most_popular(counts: np.ndarray, excluded: Excluded, choice: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k items with the largest counts for each user, of those in `choice`: rows and log shares of the events, `[n, k]`.

    Items with equal counts are in the order of the catalogue.
    """
    order = choice[np.argsort(-counts[choice], kind="stable")]
    rows = np.zeros((excluded.users, k), np.int64)
    for user in range(excluded.users):
        unwanted = excluded.user(user)
        first = order[: k + len(unwanted)]
        kept = first[~np.isin(first, unwanted)][:k]
        rows[user, : len(kept)] = kept
    popularity = np.log1p(counts) - np.log1p(counts[1:].sum())
    return rows, np.where(rows > 0, popularity[rows], -np.inf).astype(np.float32)
