"""State tracking: parity and modular arithmetic, trained on short sequences and tested on long ones (Grazzi et al. 2025).

A row is a sequence of a random size; the model answers at its last token, the rest is padding that nothing reads:

    parity      1 2 2 1 2 · · ·              bits 0 1 1 0 1, answer 1
    modular     3 + 2 * 4 - 1 = · ·          answer 0 (modulo 5; `*` binds tighter)
    brackets    ( ( - 3 ) + ( 1 - 4 ) ) = ·  answer 4

Design choices
- A size counts the answer, as published: parity of size 3 has two bits. Rows are padded on the right to the longest size.
- Scores are scaled accuracies, (accuracy - chance) / (1 - chance): 0 for guessing, 1 for a machine that keeps the state.
- Tests ask for the answer only, also for a model trained with `dense`, so scores compare.
- Expressions in brackets grow from the outside in, one level of all rows at a time. They hold + and - only, so the value is
  the sum of the digits, each with the sign collected on its way in.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from prism.lab.tasks.task import IGNORE, Batch, Task

MODULUS = 5
PLAIN = {"pad": 0, "+": 1, "-": 2, "*": 3, "=": 4, "0": 5}
"""Tokens of expressions without brackets; digits are 5 … 9."""
BRACKETS = {"0": 0, "+": 5, "-": 6, "*": 7, "(": 8, ")": 9, "=": 10, "pad": 11}
"""Tokens of expressions in brackets; digits are 0 … 4. The published numbering has a `*` that its generator never draws."""


@dataclass(frozen=True)
class Tracking(Task):
    """Sequences of random size with one answer at the end."""

    metric: ClassVar[str] = "scaled accuracy"

    shortest: int = 3
    """Smallest size in training, the answer included."""
    longest: int = 40
    """Largest size in training."""
    test_shortest: int = 40
    test_longest: int = 256

    def __post_init__(self) -> None:
        least = self.least
        for low, high in (("shortest", "longest"), ("test_shortest", "test_longest")):
            if getattr(self, low) < least:
                raise ValueError(f"{low} must be ≥ {least} for task {self.name!r}, got {getattr(self, low)}")
            if not self.sizes(getattr(self, low), getattr(self, high)):
                raise ValueError(
                    f"task {self.name!r} has no size from {low} = {getattr(self, low)} to {high} = {getattr(self, high)}: "
                    f"raise {high}"
                )

    @property
    @abstractmethod
    def least(self) -> int:
        """The smallest size that makes sense."""

    def sizes(self, low: int, high: int) -> range:
        """The sizes that exist from `low` to `high`."""
        return range(low, high + 1)

    def tests(self) -> dict[str, Task]:
        longer = replace(self, shortest=self.test_shortest, longest=self.test_longest)
        return {f"{task.shortest}-{task.longest}": task.asking_once() for task in (longer, self)}

    def asking_once(self) -> Tracking:
        """This task with the answer at the end as the only one."""
        return self

    def score(self, predictions: Tensor, targets: Tensor) -> Tensor:
        chance = 1 / self.answers
        return (super().score(predictions, targets) - chance) / (1 - chance)

    def draw_sizes(self, count: int, generator: torch.Generator) -> Tensor:
        """Sizes `[B]`, uniform over those that exist."""
        sizes = self.sizes(self.shortest, self.longest)
        return sizes.start + sizes.step * torch.randint(len(sizes), (count,), generator=generator)


@dataclass(frozen=True)
class Parity(Tracking):
    """Is the number of ones odd?"""

    name: ClassVar[str] = "parity"

    dense: bool = False
    """Ask for the parity so far at every bit (easier to learn; not the published task)."""

    @property
    def vocabulary(self) -> int:
        return 3

    @property
    def answers(self) -> int:
        return 2

    @property
    def least(self) -> int:
        return 2

    def asking_once(self) -> Parity:
        return replace(self, dense=False)

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        sizes = self.draw_sizes(count, generator)
        bits = torch.randint(2, (count, self.longest - 1), generator=generator)
        places = torch.arange(self.longest - 1)
        last = (sizes - 2)[:, None]
        asked = places <= last if self.dense else places == last
        inputs = (bits + 1).masked_fill_(places > last, 0)
        return Batch(inputs, (bits.cumsum(1) % 2).masked_fill_(~asked, IGNORE))

    def baseline(self) -> float:
        return 0.0


@dataclass(frozen=True)
class ModularArithmetic(Tracking):
    """The value of an expression modulo 5, asked at its `=`."""

    name: ClassVar[str] = "modular"

    brackets: bool = False
    """Nested brackets around +, - and unary minus, instead of +, -, * with the usual precedence."""

    @property
    def vocabulary(self) -> int:
        return 12 if self.brackets else 10

    @property
    def answers(self) -> int:
        return MODULUS

    @property
    def least(self) -> int:
        return 3

    def content(self, inputs: Tensor) -> Tensor:
        return (inputs + 1) % self.vocabulary if self.brackets else inputs  # the padding is the last token

    def sizes(self, low: int, high: int) -> range:
        # Digits and operators alternate, so only odd sizes exist without brackets.
        return range(low, high + 1) if self.brackets else range(low + 1 - low % 2, high + 1, 2)

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        sizes = self.draw_sizes(count, generator)
        tokens = BRACKETS if self.brackets else PLAIN
        inputs = torch.full((count, self.longest - 1), tokens["pad"])
        fill = _fill_brackets if self.brackets else _fill_plain
        values = fill(inputs, sizes - 2, generator)
        rows, last = torch.arange(count), sizes - 2
        inputs[rows, last] = tokens["="]
        targets = torch.full_like(inputs, IGNORE)
        targets[rows, last] = values
        return Batch(inputs, targets)

    def baseline(self) -> float:
        """Expected score of the answer 0, which products make likelier than the others."""
        if self.brackets:
            return 0.0
        sizes = self.sizes(self.shortest, self.longest)
        accuracy = sum(_chance_of_zero(size - 2) for size in sizes) / len(sizes)
        return (accuracy - 1 / MODULUS) / (1 - 1 / MODULUS)


def _fill_plain(inputs: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
    """Write expressions of the given odd lengths `[B]` into the rows `[B, T]` and return their values `[B]`."""
    count = len(inputs)
    terms = inputs.shape[1] // 2
    digits = torch.randint(MODULUS, (count, terms), generator=generator)
    operators = torch.randint(1, 4, (count, terms), generator=generator)  # operators[:, i] precedes digits[:, i]
    operators[:, 0] = PLAIN["+"]
    inside = 2 * torch.arange(terms) < lengths[:, None]
    inputs[:, 0 : 2 * terms : 2] = (digits + PLAIN["0"]).masked_fill_(~inside, PLAIN["pad"])
    inputs[:, 1 : 2 * terms - 1 : 2] = operators[:, 1:].masked_fill(~inside[:, 1:], PLAIN["pad"])
    # Past the end every term is + 0, so the sums below need no lengths.
    factors, signs = digits.masked_fill_(~inside, 0).T.contiguous(), operators.masked_fill_(~inside, PLAIN["+"]).T
    total, product = torch.zeros_like(lengths), torch.zeros_like(lengths)
    for factor, sign in zip(factors, signs.contiguous(), strict=True):
        times = sign == PLAIN["*"]
        total = torch.where(times, total, total + product)
        product = torch.where(times, product * factor % MODULUS, torch.where(sign == PLAIN["-"], -factor, factor))
    return (total + product) % MODULUS


def _fill_brackets(inputs: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
    """Write bracketed expressions of the given lengths `[B]` into the rows `[B, T]` and return their values `[B]`.

    An expression of length n ≥ 5 is `( left operator right )`, the length of the left part uniform over 1 … n - 4. Shorter
    ones are leaves: `d`, `- d`, `( d )`, `( - d )`.
    """
    flat, width = inputs.view(-1), inputs.shape[1]
    rows = torch.arange(len(inputs))
    starts, sign = rows * width, torch.ones_like(lengths)
    values = torch.zeros_like(lengths)
    while len(rows):
        leaf = lengths < 5
        values.index_add_(0, rows[leaf], _fill_leaves(flat, starts[leaf], lengths[leaf], sign[leaf], generator))
        rows, starts, lengths, sign = (x[~leaf] for x in (rows, starts, lengths, sign))
        left = (torch.rand(len(rows), generator=generator, dtype=torch.float64) * (lengths - 4)).long() + 1
        minus = torch.randint(2, (len(rows),), generator=generator)
        flat[starts], flat[starts + lengths - 1] = BRACKETS["("], BRACKETS[")"]
        flat[starts + 1 + left] = BRACKETS["+"] + minus
        rows = torch.cat([rows, rows])
        starts = torch.cat([starts + 1, starts + left + 2])
        lengths = torch.cat([left, lengths - left - 3])
        sign = torch.cat([sign, sign * (1 - 2 * minus)])
    return values % MODULUS


def _fill_leaves(flat: Tensor, starts: Tensor, lengths: Tensor, sign: Tensor, generator: torch.Generator) -> Tensor:
    """Write leaves of length 1 … 4 and return their values with their signs."""
    digits = torch.randint(MODULUS, (len(starts),), generator=generator)
    bracket, minus = lengths >= 3, lengths % 2 == 0
    flat[starts[bracket]], flat[(starts + lengths - 1)[bracket]] = BRACKETS["("], BRACKETS[")"]
    flat[(starts + bracket)[minus]] = BRACKETS["-"]
    flat[starts + bracket.long() + minus.long()] = digits
    return torch.where(minus, -digits, digits) * sign


def _chance_of_zero(length: int) -> float:
    """The chance that an expression without brackets of this length is 0 modulo 5."""
    digit, every = torch.arange(MODULUS), torch.arange(MODULUS)
    # chance[t, p]: the finished terms sum to t, the open product is p
    chance = torch.zeros(MODULUS, MODULUS, dtype=torch.float64)
    chance[0] = 1 / MODULUS
    total, product, factor = torch.meshgrid(every, every, digit, indexing="ij")
    for _ in range(length // 2):
        share = (chance[:, :, None] / (3 * MODULUS)).expand(MODULUS, MODULUS, MODULUS)
        after = torch.zeros_like(chance)
        after.index_put_((total, product * factor % MODULUS), share, accumulate=True)
        for sign in (1, -1):
            after.index_put_(((total + product) % MODULUS, sign * factor % MODULUS), share, accumulate=True)
        chance = after
    return float(chance[(every, -every % MODULUS)].sum())
