"""The nine PRISM probes as the authors' released code draws them, with its flaws, and the best answer to each.

Each function fills noise `[B, N]` and returns the answer `[B]`; it is asked at the last token. What is wrong with them (the
page on probes has the consequences): noise uses the ids of data and even of control tokens, so patterns occur by chance;
variable tracking has no chain of variables; poly-recall has no contexts; "palindrome" compares the first of four tokens
with the last two; parity takes ids from 4 to 7 for bits.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.lab.tasks.draws import Draw, pick, skip

DATA = 10
"""First id of data in the three memory probes."""
VARIABLES = 3
MODULUS = 16


def mqar(draw: Draw, n: int) -> tuple[Tensor, Tensor]:
    """n pairs at even places of the first half; `1 key` at the end. Noise is free of the keys, values are not."""
    N, V = draw.length, draw.vocabulary
    keys, values = draw.distinct(DATA, V, n), draw.integers(DATA, V, n)
    tokens = skip(draw.integers(DATA, V - n, N), keys)
    places = 2 * draw.distinct(0, (N // 2 + 1) // 2, n)
    for i in range(n):
        draw.put(tokens, places[:, i], keys[:, i], values[:, i])
    asked = draw.integers(0, n)
    tokens[:, -2], tokens[:, -1] = 1, pick(keys, asked)
    return tokens, pick(values, asked)


def poly_recall(draw: Draw, n: int) -> tuple[Tensor, Tensor]:
    """A marker 2, then n pairs; `1 key` at the end."""
    N, V = draw.length, draw.vocabulary
    tokens = draw.integers(DATA, V, N)
    keys, values = draw.distinct(DATA, V, n), draw.integers(DATA, V, n)
    pairs = torch.stack([keys, values], 2).flatten(1)
    draw.put(tokens, draw.integers(0, N - 2 * n - 5), 2, *pairs.T)
    asked = draw.integers(0, n)
    tokens[:, -2], tokens[:, -1] = 1, pick(keys, asked)
    return tokens, pick(values, asked)


def variable_tracking(draw: Draw, n: int) -> tuple[Tensor, Tensor]:
    """n writes `key value` to any of three keys, which may overlap; `1 key` asks for the last value of a written key."""
    N, V = draw.length, draw.vocabulary
    tokens = draw.integers(DATA, V, N)
    written = draw.integers(0, VARIABLES, n)
    keys, values = draw.distinct(DATA, V, VARIABLES).gather(1, written), draw.integers(DATA, V, n)
    places = draw.distinct(0, N - 10, n).sort(1).values
    for i in range(n):
        draw.put(tokens, places[:, i], keys[:, i], values[:, i])
    later = (keys[:, :, None] == keys[:, None, :]).triu(1).any(2)
    asked = draw.choose(~later)
    tokens[:, -2], tokens[:, -1] = 1, pick(keys, asked)
    return tokens, pick(values, asked)


def parity(draw: Draw, n: int) -> tuple[Tensor, Tensor]:
    """n ids from 4 to 7 and the marker 3; the answer is their sum modulo 2."""
    tokens, bits = draw.integers(4, draw.vocabulary, draw.length), draw.integers(4, 8, n)
    draw.put(tokens, draw.integers(0, draw.length - n - 5), *bits.T, 3)
    tokens[:, -1] = 2
    return tokens, bits.sum(1) % 2


def local_xor(draw: Draw, n: int) -> tuple[Tensor, Tensor]:
    """Two ids and the marker 2; the answer is 3 if one of them is odd, else 4."""
    N, V = draw.length, draw.vocabulary
    tokens, a, b = draw.integers(5, V, N), draw.integers(5, V - 10), draw.integers(5, V - 10)
    draw.put(tokens, draw.integers(0, N - 8), a, b, 2)
    tokens[:, -1] = 1
    return tokens, 4 - (a + b) % 2


def modulo_add(draw: Draw, n: int) -> tuple[Tensor, Tensor]:
    """Two numbers below 16 and the marker V - 2; the answer is their sum modulo 16."""
    N, V = draw.length, draw.vocabulary
    tokens, a, b = draw.integers(0, V - 2, N), draw.integers(0, MODULUS), draw.integers(0, MODULUS)
    draw.put(tokens, draw.integers(0, N - 5), a, b, V - 2)
    tokens[:, -1] = V - 1
    return tokens, (a + b) % MODULUS


def palindrome(draw: Draw, n: int) -> tuple[Tensor, Tensor]:
    """Four ids a b c d and the marker 3; the answer is 1 if a is c or d (never both), else 0."""
    N, V = draw.length, draw.vocabulary
    tokens, a, b = draw.integers(5, V, N), draw.integers(5, V), draw.integers(5, V)
    c, d = (other + (other >= a) for other in (draw.integers(5, V - 1), draw.integers(5, V - 1)))
    same, fourth = draw.integers(0, 2), draw.integers(0, 2)
    c, d = torch.where((same * (1 - fourth)).bool(), a, c), torch.where((same * fourth).bool(), a, d)
    draw.put(tokens, draw.integers(0, N - 5), a, b, c, d, 3)
    tokens[:, -1] = 4
    return tokens, same


def mux(draw: Draw, n: int) -> tuple[Tensor, Tensor]:
    """A selector 3 or 4, an id of the lower and one of the upper half, the marker 2; the answer is the selected id."""
    N, V = draw.length, draw.vocabulary
    tokens, selected = draw.integers(0, V, N), draw.integers(0, 2)
    low, high = draw.integers(5, V // 2), draw.integers(V // 2, V)
    draw.put(tokens, draw.integers(0, N - 10), 3 + selected, low, high, 2)
    tokens[:, -1] = 1
    return tokens, torch.where(selected.bool(), high, low)


def silence_gate(draw: Draw, n: int) -> tuple[Tensor, Tensor]:
    """1 (on) or 2 (off), a key, a value; `3 key` asks for the value, or for 0 if it was off."""
    N, V = draw.length, draw.vocabulary
    tokens, trigger = draw.integers(0, V, N), draw.integers(1, 3)
    key, value = draw.integers(4, V - 5), draw.integers(4, V - 5)
    draw.put(tokens, draw.integers(0, N - 5), trigger, key, value)
    tokens[:, -2], tokens[:, -1] = 3, key
    return tokens, torch.where(trigger == 1, value, 0)


Generator = Callable[[Draw, int], tuple[Tensor, Tensor]]
GENERATORS: dict[str, Generator] = {
    f.__name__: f
    for f in (mqar, poly_recall, variable_tracking, parity, local_xor, modulo_add, palindrome, mux, silence_gate)
}
OPERATIONS = {"mqar": 2, "poly_recall": 2, "variable_tracking": 3, "parity": 3}
"""Pairs, pairs, writes and bits of the probes whose number of operations can be set, with the released numbers."""


def most_operations(kind: str, vocabulary: int, length: int) -> int:
    """The largest number of operations for which there are enough ids."""
    ids = vocabulary - DATA
    return {"mqar": ids - 1, "poly_recall": ids, "variable_tracking": 10}.get(
        kind, length
    )  # 10: `_last_write` tries all


def best_answer(kind: str, tokens: Tensor, vocabulary: int, n: int) -> Tensor:
    """The likeliest answer `[B]` given the tokens, for the kinds whose answer is not certain.

    Every place where the pattern may have been written is weighed by its chance. For `variable_tracking` the (rare) overlaps
    of writes are left out of the weights.
    """
    after = [F.pad(tokens, (0, i))[:, i:] for i in range(4)]
    last = tokens[:, -1:]
    if kind == "mux":
        low, high = (after[1] >= 5) & (after[1] < vocabulary // 2), after[2] >= vocabulary // 2
        weights = ((tokens == 3) | (tokens == 4)) & low & high & (after[3] == 2)
        answers, end = torch.where(tokens == 3, after[1], after[2]), 10
    elif kind == "silence_gate":
        data = (after[2] >= 4) & (after[2] < vocabulary - 5)
        weights = ((tokens == 1) | (tokens == 2)) & (after[1] == last) & data
        answers, end = torch.where(tokens == 1, after[2], 0), 5
    else:
        answers, end = after[1], 10
        found = (tokens == last)[:, :-end]
        weights = _last_write(tokens.shape[1] - end, vocabulary, n)[found.cumsum(1)] * found
    weights = weights[:, : tokens.shape[1] - end].double()
    votes = torch.zeros(len(tokens), vocabulary, dtype=torch.float64)
    return votes.scatter_add_(1, answers[:, : weights.shape[1]], weights).argmax(1)


def _last_write(places: int, vocabulary: int, writes: int) -> Tensor:
    """Relative chance that the j-th occurrence of the asked key is its last write, by j `[places + 1]`.

    With m of the writes to that key, they are any m of its occurrences; each makes the tokens likelier by the number of ids,
    because noise would show the key only by chance.
    """
    chance: dict[int, float] = {}
    for keys in itertools.product(range(VARIABLES), repeat=writes):
        counts = Counter(keys)
        for number in counts.values():
            chance[number] = chance.get(number, 0.0) + 1 / len(counts)
    ids = vocabulary - DATA
    return torch.tensor(
        [
            sum(p * ids**m * math.comb(j - 1, m - 1) / math.comb(places, m) for m, p in chance.items()) if j else 0.0
            for j in range(places + 1)
        ],
        dtype=torch.float64,
    )
