"""The nine PRISM probes as the paper describes them: every answer is certain, because ids have disjoint meanings.

    0 null · 1 … 9 control · data (half of the vocabulary, from 10 on) · noise (the rest)

A probe places its items (short patterns) in noise, in order and without overlap, and asks at the last token. Where keys and
values exist, keys are the lower half of the data and values the upper half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from prism.lab.tasks.draws import Draw, pick

QUERY, MARK, FIRST = 1, 2, 3
"""Control tokens: before or at the question, after a pattern, and the first of those that select (3 … 9)."""
ASSIGN = 9
DATA = 10
MODULUS = 10
KEYS = 2
"""Keys under every context of poly-recall."""
CHAINS = 2


class Ids(NamedTuple):
    """Where blocks of ids start and end."""

    values: int
    """First id of values; keys are DATA … values - 1."""
    noise: int
    """First id of noise; data are DATA … noise - 1."""


class Question(NamedTuple):
    """What a probe shows and asks."""

    items: Tensor
    """Patterns `[B, n, w]`, in order of time."""
    query: Tensor
    """The last tokens `[B, q]`."""
    answer: Tensor
    """`[B]`."""


def ids(vocabulary: int) -> Ids:
    """The blocks of ids of a vocabulary."""
    quarter = vocabulary // 4
    return Ids(DATA + quarter, DATA + 2 * quarter)


def mqar(draw: Draw, n: int) -> Question:
    """n pairs `key value` with different keys; `1 key` asks for one."""
    block = ids(draw.vocabulary)
    keys, values = draw.distinct(DATA, block.values, n), draw.integers(block.values, block.noise, n)
    asked = draw.integers(0, n)
    return Question(torch.stack([keys, values], 2), _ask(draw, pick(keys, asked)), pick(values, asked))


def poly_recall(draw: Draw, n: int) -> Question:
    """`context key value` for n contexts with the same two keys; `1 context key` asks. A key has another value in each."""
    block = ids(draw.vocabulary)
    order = draw.distinct(0, n * KEYS, n * KEYS)
    contexts = FIRST + order // KEYS
    keys = draw.distinct(DATA, block.values, KEYS).gather(1, order % KEYS)
    values = draw.distinct(block.values, block.noise, n * KEYS)
    asked = draw.integers(0, n * KEYS)
    query = _ask(draw, pick(contexts, asked), pick(keys, asked))
    return Question(torch.stack([contexts, keys, values], 2), query, pick(values, asked))


def variable_tracking(draw: Draw, n: int) -> Question:
    """Two interleaved chains of n assignments `9 variable source`: the first from a value, the others from the variable before.

    `1 variable` asks for the value that the last variable of a chain has.
    """
    block, B = ids(draw.vocabulary), draw.count
    variables = draw.distinct(DATA, block.values, CHAINS * n).view(B, CHAINS, n)
    values = draw.distinct(block.values, block.noise, CHAINS)
    sources = torch.cat([values[:, :, None], variables[:, :, :-1]], 2)
    chains = torch.stack([torch.full_like(variables, ASSIGN), variables, sources], 3)
    # A random order of the chains' labels; the assignments of a chain keep theirs (a stable sort by rank within it).
    labels = draw.distinct(0, CHAINS * n, CHAINS * n) // n
    place = labels.argsort(dim=1, stable=True).argsort(1)  # [B, time] → index in the chains laid end to end
    items = chains.flatten(1, 2).gather(1, place[:, :, None].expand(-1, -1, 3))
    asked = draw.integers(0, CHAINS)
    return Question(items, _ask(draw, pick(variables[:, :, -1], asked)), pick(values, asked))


def parity(draw: Draw, n: int) -> Question:
    """n bits (the first two data ids) and a marker; the answer is 1 if an odd number of them is set, else 0."""
    bits = draw.integers(0, 2, n)
    return Question(_marked(draw, DATA + bits), _ask(draw), bits.sum(1) % 2)


def local_xor(draw: Draw, n: int) -> Question:
    """Two data ids and a marker; the answer is 1 if one of them is odd, else 0."""
    pair = draw.integers(DATA, ids(draw.vocabulary).noise, 2)
    return Question(_marked(draw, pair), _ask(draw), pair.sum(1) % 2)


def modulo_add(draw: Draw, n: int) -> Question:
    """n digits (the first ten data ids) and a marker; the answer is the digit of their sum modulo 10."""
    digits = draw.integers(0, MODULUS, n)
    return Question(_marked(draw, DATA + digits), _ask(draw), DATA + digits.sum(1) % MODULUS)


def palindrome(draw: Draw, n: int) -> Question:
    """Three data ids and a marker: a b a (answer 1), or a a b or b a a (answer 0)."""
    a, b = draw.distinct(DATA, ids(draw.vocabulary).noise, 2).T
    same, front = draw.integers(0, 2), draw.integers(0, 2)
    odd = torch.where(same.bool(), 1, 2 * front)  # the place of b
    three = torch.where(torch.arange(3) == odd[:, None], b[:, None], a[:, None])
    return Question(_marked(draw, three), _ask(draw), same)


def mux(draw: Draw, n: int) -> Question:
    """A selector (3 …), n different data ids and a marker; the answer is the selected id."""
    channels, selected = draw.distinct(DATA, ids(draw.vocabulary).noise, n), draw.integers(0, n)
    pattern = torch.cat([FIRST + selected[:, None], channels], 1)
    return Question(_marked(draw, pattern), _ask(draw), pick(channels, selected))


def silence_gate(draw: Draw, n: int) -> Question:
    """n triples of 3 (on) or 4 (off), key, value with different keys; `1 key` asks for its value, or 0 if it was off."""
    block = ids(draw.vocabulary)
    off, keys = draw.integers(0, 2, n), draw.distinct(DATA, block.values, n)
    values = draw.integers(block.values, block.noise, n)
    asked = draw.integers(0, n)
    answer = pick(values, asked) * (1 - pick(off, asked))
    return Question(torch.stack([FIRST + off, keys, values], 2), _ask(draw, pick(keys, asked)), answer)


Generator = Callable[[Draw, int], Question]
GENERATORS: dict[str, Generator] = {
    f.__name__: f
    for f in (mqar, poly_recall, variable_tracking, parity, local_xor, modulo_add, palindrome, mux, silence_gate)
}
OPERATIONS = {
    "mqar": 2,
    "poly_recall": 2,
    "variable_tracking": 3,
    "parity": 3,
    "modulo_add": 2,
    "mux": 2,
    "silence_gate": 1,
}
"""Pairs, contexts, assignments, bits, digits, channels and triples of the probes whose number can be set, with defaults."""


def most_operations(kind: str, vocabulary: int, length: int) -> int:
    """The largest number of operations for which there are enough ids."""
    half, selectors = vocabulary // 4, ASSIGN - FIRST + 1
    limits = {
        "mqar": half,
        "poly_recall": min(half // KEYS, selectors),
        "variable_tracking": half // CHAINS,
        "mux": min(2 * half, selectors),
        "silence_gate": half,
    }
    return limits.get(kind, length)


def place(draw: Draw, question: Question, distance: int | None) -> Tensor:
    """Put items and query into noise `[B, N]`.

    Args:
        distance: noise tokens between the last item and the query; None: the items are anywhere.
    """
    items, query = question.items, question.query
    n, width = items.shape[1:]
    tokens = draw.integers(ids(draw.vocabulary).noise, draw.vocabulary, draw.length)
    room = draw.length - query.shape[1]
    if distance is None:
        starts = _apart(draw, n, width, room)
    else:
        last = room - distance - width
        starts = torch.cat([_apart(draw, n - 1, width, last), torch.full((draw.count, 1), last)], 1)
    places = starts[:, :, None] + torch.arange(width)
    tokens.scatter_(1, places.flatten(1), items.flatten(1))
    tokens[:, room:] = query
    return tokens


def _apart(draw: Draw, n: int, width: int, room: int) -> Tensor:
    """Starts `[B, n]` of n items of this width in `room` places without overlap, all arrangements equally likely."""
    return draw.distinct(0, room - n * (width - 1), n).sort(1).values + torch.arange(n) * (width - 1)


def _marked(draw: Draw, pattern: Tensor) -> Tensor:
    """One item `[B, 1, w + 1]`: the pattern and the marker."""
    return torch.cat([pattern, torch.full((draw.count, 1), MARK)], 1)[:, None]


def _ask(draw: Draw, *tokens: Tensor) -> Tensor:
    """The query: its control token, then what is asked for."""
    return torch.stack([torch.full((draw.count,), QUERY), *tokens], 1)
