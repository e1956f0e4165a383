"""Choose the next tokens of rows as `prism generate` does, and say where rounding could change the choice.

A row of a batch has the logits of the same text alone, up to rounding. That changes a token only where two candidates are
nearly tied. `choose_rows` finds those cases: it returns None for a row if logits that differ by up to `tolerance` could give
another token. The scheduler then computes this text's logits alone, and the choice is made with those (`Sampling.choose`).

Sampling is a race: every token's weight is divided by a random number drawn for it, and the largest quotient wins. This is
how `torch.multinomial` draws one token. So a tie is a second quotient close to the first, or a token that is close to the
edge of top-k or top-p and would win.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.language.generate import Sampling


def choose_rows(
    logits: Tensor, samplings: Sequence[Sampling], randoms: Sequence[torch.Generator], tolerance: Tensor | None
) -> list[int | None]:
    """The tokens that `sampling.choose` gives for logits `[B, V]`; None where that is not certain.

    Args:
        randoms: the generator of every row; that of an uncertain row is left as it was.
        tolerance: `[B]`, how much the logits of a row may differ from those of the text alone. None: they are taken as
            they are, and every choice is certain.
    """
    tokens: list[int | None] = [None] * len(logits)
    for sampling in set(samplings):  # rows that are sampled alike share the work
        rows = [i for i, each in enumerate(samplings) if each == sampling]
        chosen = _greedy if sampling.temperature == 0 else _sampled
        parts = logits[rows], sampling, [randoms[i] for i in rows], None if tolerance is None else tolerance[rows]
        for i, token in zip(rows, chosen(*parts), strict=True):
            tokens[i] = token
    return tokens


def _greedy(
    logits: Tensor, _: Sampling, __: Sequence[torch.Generator], tolerance: Tensor | None
) -> Sequence[int | None]:
    tokens = logits.argmax(-1)
    if tolerance is None:
        return tokens.tolist()
    first, second = _two_best(logits)
    return _known(tokens, first - second > 2 * tolerance)


def _sampled(
    logits: Tensor, sampling: Sampling, randoms: Sequence[torch.Generator], tolerance: Tensor | None
) -> Sequence[int | None]:
    before = [random.get_state() for random in randoms]
    weights = sampling.weights(logits)
    drawn = torch.empty_like(weights)
    for row, random in zip(drawn, randoms, strict=True):
        row.exponential_(1, generator=random)
    tokens = (weights / drawn).argmax(-1)
    if tolerance is None:
        return tokens.tolist()
    certain = _certain(tokens, logits, drawn, sampling, 2 * tolerance[:, None] / sampling.temperature)
    for random, state, sure in zip(randoms, before, certain.tolist(), strict=True):
        if not sure:
            random.set_state(state)
    return _known(tokens, certain)


def _certain(tokens: Tensor, logits: Tensor, drawn: Tensor, sampling: Sampling, change: Tensor) -> Tensor:
    """`[B]`: whether these tokens win whatever logits the texts alone have.

    Args:
        drawn: `[B, V]`, the random numbers of the race.
        change: `[B, 1]`, how much two scores (logits over temperature) may move against each other.
    """
    scores, tokens = logits / sampling.temperature, tokens[:, None]
    certain = torch.ones_like(tokens, dtype=torch.bool)
    if sampling.top_k is not None and sampling.top_k < scores.shape[1]:
        best = scores.topk(sampling.top_k + 1).values
        last, next_one = best[:, -2:-1], best[:, -1:]
        certain &= last - next_one > change
        scores = scores.masked_fill(scores < last, -math.inf)
    race = scores - drawn.log()
    if sampling.top_p is not None and sampling.top_p < 1:
        surely, perhaps = _kept(scores, 1 - sampling.top_p, change)
        certain &= surely.gather(1, tokens)
        race = race.masked_fill(~perhaps, -math.inf)
    others = race.scatter(1, tokens, -math.inf).max(-1, keepdim=True).values
    certain &= race.gather(1, tokens) - others > change
    return certain[:, 0]


def _kept(scores: Tensor, dropped: float, change: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, V]`: which tokens top-p keeps surely, and which perhaps.

    It keeps a token if it and all less likely ones have a probability above `dropped`, and the most likely one in any case.
    Tokens whose scores are closer than `change` may be in either order.
    """
    ordered, places = scores.sort()
    probabilities = ordered.softmax(-1)
    below = F.pad(probabilities.cumsum(-1), (1, 0))  # [B, V + 1], the probability of the i least likely tokens
    least = below.gather(1, torch.searchsorted(ordered, ordered - change)) + probabilities
    most = below.gather(1, torch.searchsorted(ordered, ordered + change, right=True))
    best = ordered >= ordered[:, -1:] - change
    surely = (least > dropped + change) | (best & (best.sum(-1, keepdim=True) == 1))
    perhaps = (most > dropped - change) | best
    return torch.empty_like(best).scatter_(1, places, surely), torch.empty_like(best).scatter_(1, places, perhaps)


def _two_best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the second largest of scores `[B, V]`."""
    best = scores.topk(min(2, scores.shape[1])).values
    return best[:, 0], best[:, 1] if best.shape[1] > 1 else torch.full_like(best[:, 0], -math.inf)


def _known(tokens: Tensor, certain: Tensor) -> list[int | None]:
    return [token if sure else None for token, sure in zip(tokens.tolist(), certain.tolist(), strict=True)]
