"""A needle in a haystack: one value in a long filler, asked for at the end; trained short, tested up to 8 times as long.

Small variants of RULER's S-NIAH 1 to 3 (Hsieh et al., 2024) that a model can be trained on within minutes:

    filler … MARK k v₁ … vₗ … filler  Q k v₁ … vₗ₋₁             from the last k on, the answers are v₁ … vₗ

    level   filler                          value
    1       a fixed loop of 8 tokens        2 symbols
    2       Markov text over 64 tokens      2 symbols
    3       Markov text over 64 tokens      8 symbols

The needle lies at any depth with equal chance. The Markov text has five likely followers a token, the same in every
sequence. With one needle its key is not needed to find it, as in S-NIAH; more `needles` have other keys (MK-NIAH).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from prism.lab.tasks.draws import distinct
from prism.lab.tasks.task import IGNORE, Batch, Task

MARK, QUESTION = 0, 1
KEYS = range(2, 18)
SYMBOLS = range(18, 34)
FILLER = SYMBOLS.stop
"""The first token of the filler."""
_LOOP, _WORDS = 8, 64
_CHANCES = (6, 4, 3, 2, 1)
"""How often, of 16 times, each of a word's followers comes next."""


@dataclass(frozen=True)
class Needle(Task):
    """One setting of the task. A sequence scores 1 where all symbols of the value are right, else 0.

    The baseline answers with any symbols.
    """

    name: ClassVar[str] = "needle"
    metric: ClassVar[str] = "exact match"

    level: int = 1
    """1, 2 or 3: which filler and how long a value."""
    length: int = 128
    """Tokens in a sequence, with question and answer."""
    needles: int = 1
    """Needles in a sequence, each with its own key; one of them is asked for."""

    def __post_init__(self) -> None:
        if self.level not in (1, 2, 3):
            raise ValueError(f"level must be 1, 2 or 3, got {self.level}")
        if not 1 <= self.needles <= len(KEYS):
            raise ValueError(f"needles must be between 1 and {len(KEYS)}, got {self.needles}")
        least = self.needles * self._needle + self._question
        if self.length < least:
            raise ValueError(
                f"length must be ≥ {least} for {self.needles} needles of level {self.level}, got {self.length}"
            )

    @property
    def symbols(self) -> int:
        """Symbols in a value."""
        return 8 if self.level == 3 else 2

    @property
    def vocabulary(self) -> int:
        return FILLER + (_LOOP if self.level == 1 else _WORDS)

    @property
    def _needle(self) -> int:
        return 2 + self.symbols

    @property
    def _question(self) -> int:
        return 1 + self.symbols

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """Draw tokens `[B, T]` and answers `[B, T]`."""
        n, device = self.needles, generator.device
        keys = distinct(count, n, len(KEYS), generator) + KEYS.start
        values = (
            torch.randint(len(SYMBOLS), (count, n, self.symbols), generator=generator, device=device) + SYMBOLS.start
        )
        marks = torch.full((count, n, 1), MARK, device=device)
        needles = torch.cat([marks, keys.unsqueeze(2), values], 2)
        body = self.length - self._question
        # Needles do not overlap: choose their places as if they were one token long, then make room for the rest.
        text = body - n * self._needle
        starts = distinct(count, n, text + n, generator).sort(1).values
        starts = starts + (self._needle - 1) * torch.arange(n, device=device)
        inside = (starts.unsqueeze(2) + torch.arange(self._needle, device=device)).flatten(1)
        tokens = torch.zeros(count, self.length, dtype=torch.long, device=device)
        free = torch.ones(count, body, dtype=torch.bool, device=device).scatter_(1, inside, False)
        tokens[:, :body][free] = self._filler(count, text, generator).flatten()
        tokens.scatter_(1, inside, needles.flatten(1))
        chosen = torch.randint(n, (count, 1), generator=generator, device=device)
        value = values.gather(1, chosen.unsqueeze(2).expand(-1, 1, self.symbols)).squeeze(1)
        tokens[:, body] = QUESTION
        tokens[:, body + 1] = keys.gather(1, chosen).squeeze(1)
        tokens[:, body + 2 :] = value[:, :-1]
        answers = torch.full_like(tokens, IGNORE)
        answers[:, body + 1 :] = value
        return Batch(tokens, answers)

    def tests(self) -> dict[str, Task]:
        return {f"length={n}": replace(self, length=n) for n in (self.length * factor for factor in (1, 2, 4, 8))}

    def score(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return ((predictions == targets) | (targets == IGNORE)).all(1).float()

    def baseline(self) -> float:
        return float(len(SYMBOLS)) ** -self.symbols

    def _filler(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Draw `length` tokens of filler for each sequence `[count, length]`."""
        device = generator.device
        if self.level == 1:
            return (FILLER + torch.arange(length, device=device) % _LOOP).expand(count, length)
        followers = _followers().to(device).flatten()
        words = torch.empty(length, count, dtype=torch.long, device=device)
        choices = torch.randint(16, (length, count), generator=generator, device=device)
        word = torch.randint(_WORDS, (count,), generator=generator, device=device)
        for i in range(length):
            torch.take(followers, word * 16 + choices[i], out=words[i])
            word = words[i]
        return FILLER + words.T


@lru_cache(maxsize=1)
def _followers() -> Tensor:
    """The 16 equally likely next words of every word `[64, 16]`: five different ones, some of them several times."""
    followers = distinct(_WORDS, len(_CHANCES), _WORDS, torch.Generator().manual_seed(0))
    return followers.repeat_interleave(torch.tensor(_CHANCES), 1)
