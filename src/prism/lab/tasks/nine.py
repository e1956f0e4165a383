"""The nine PRISM probes: small questions about a pattern hidden in noise, asked at the last token.

    mqar               … k₁ v₁ … k₂ v₂ … 1 k₂                   the value of a key
    poly_recall        … c₁ k v … c₂ k w … 1 c₂ k               the value of a key in a context
    variable_tracking  … 9 x v … 9 y x … 1 y                    the value at the start of a chain of variables
    parity             … b₁ b₂ b₃ 2 … 1                         is an odd number of bits set?
    local_xor          … a b 2 … 1                              is one of two ids odd?
    modulo_add         … a b 2 … 1                              a + b modulo 10
    palindrome         … a b c 2 … 1                            is a = c?
    mux                … s x₀ x₁ 2 … 1                          x₀ or x₁, as the selector s says
    silence_gate       … on k v … 1 k                           the value of a key, or 0 if its gate was off

Mode `paper` (shown above) gives ids disjoint meanings, so every answer is certain. Mode `released` draws what the authors'
released code draws: other patterns under the same names, and noise that hides some of the answers (`ceiling` says how many).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import ClassVar

import torch

from prism.lab.tasks import nine_paper, nine_released
from prism.lab.tasks.draws import Draw
from prism.lab.tasks.task import IGNORE, Batch, Task

KINDS = tuple(nine_paper.GENERATORS)
MODES = ("paper", "released")
RECALL = ("mqar", "poly_recall", "variable_tracking")
"""The kinds that the released code runs at length 64."""
_CEILING_SAMPLES = 40_000


@dataclass(frozen=True)
class NineProbes(Task):
    """One of the nine probes."""

    name: ClassVar[str] = "nine"

    kind: str = "mqar"
    """Which probe."""
    mode: str = "paper"
    """`paper` or `released`."""
    length: int | None = None
    """Tokens in a sequence. None: 128; 64 for the released kinds mqar, poly_recall and variable_tracking."""
    ids: int | None = None
    """Size of the vocabulary. None: 64; 32 in mode `released`."""
    n_ops: int | None = None
    """Pairs, contexts, assignments, bits, digits, channels or triples. None: the published number."""
    distance: int | None = None
    """Noise tokens between the last pattern and the question, in mode `paper`. None: patterns are anywhere."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.mode not in MODES:
            raise ValueError(f"mode must be 'paper' or 'released', got {self.mode!r}")
        if self.vocabulary < 24:
            raise ValueError(f"ids must be ≥ 24, got {self.ids}")
        self._check_operations()
        if self.distance is not None and self.mode == "released":
            raise ValueError(f"distance cannot be set in mode 'released', got {self.distance}: use mode 'paper'")
        if self.distance is not None and self.distance < 0:
            raise ValueError(f"distance must be ≥ 0, got {self.distance}")
        if self.tokens < self._least_length():
            raise ValueError(f"length must be ≥ {self._least_length()} for these settings, got {self.tokens}")

    def _check_operations(self) -> None:
        if self.n_ops is None:
            return
        if self.kind not in self._module.OPERATIONS:
            raise ValueError(f"n_ops cannot be set for kind {self.kind!r} in mode {self.mode!r}, got {self.n_ops}")
        most = self._module.most_operations(self.kind, self.vocabulary, self.tokens)
        if not 1 <= self.n_ops <= most:
            raise ValueError(
                f"n_ops must be 1 … {most} for kind {self.kind!r} and {self.vocabulary} ids, got {self.n_ops}"
            )

    def _least_length(self) -> int:
        n = self.operations
        if self.mode == "released":  # by the ranges that its generators draw places from
            least = {"mqar": 4 * n + 2, "poly_recall": 2 * n + 6, "variable_tracking": n + 10, "parity": n + 6}
            return least.get(self.kind, 11)
        question = nine_paper.GENERATORS[self.kind](Draw(1, 0, self.vocabulary, torch.Generator()), n)
        return question.items[0].numel() + question.query.shape[1] + (self.distance or 0)

    @property
    def _module(self) -> ModuleType:
        return nine_paper if self.mode == "paper" else nine_released

    @property
    def vocabulary(self) -> int:
        return self.ids if self.ids is not None else 64 if self.mode == "paper" else 32

    @property
    def tokens(self) -> int:
        """The length of a sequence."""
        if self.length is not None:
            return self.length
        return 64 if self.mode == "released" and self.kind in RECALL else 128

    @property
    def operations(self) -> int:
        """The number of operations in a sequence; 1 where it cannot be set."""
        return self.n_ops if self.n_ops is not None else self._module.OPERATIONS.get(self.kind, 1)

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        draw = Draw(count, self.tokens, self.vocabulary, generator)
        if self.mode == "paper":
            question = nine_paper.GENERATORS[self.kind](draw, self.operations)
            inputs, answer = nine_paper.place(draw, question, self.distance), question.answer
        else:
            inputs, answer = nine_released.GENERATORS[self.kind](draw, self.operations)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, -1] = answer
        return Batch(inputs, targets)

    def ceiling(self) -> float:
        """Expected score of the likeliest answer given the tokens: below 1 where released noise imitates the pattern."""
        certain = self.mode == "paper" or self.kind not in ("variable_tracking", "mux", "silence_gate")
        return 1.0 if certain else _simulated_ceiling(self)

    def baseline(self) -> float:
        """The likeliest answer or, in mode `paper`, a guess among the values that the sequence shows, if that is better."""
        V = self.vocabulary
        if self.kind in ("parity", "palindrome", "silence_gate"):
            return 0.5
        if self.mode == "paper":
            n, equal = self.operations, 1 / (V // 4)  # values of two pairs of mqar may be equal
            return {
                "mqar": 1 / n + (1 - 1 / n) * equal,
                "poly_recall": 1 / (n * nine_paper.KEYS),
                "variable_tracking": 1 / nine_paper.CHAINS,
                "local_xor": 1 / 2,
                "modulo_add": 1 / nine_paper.MODULUS,
                "mux": 1 / n,
            }[self.kind]
        if self.kind == "local_xor":
            odd = sum(token % 2 for token in range(5, V - 10)) / (V - 15)
            return max(2 * odd * (1 - odd), 1 - 2 * odd * (1 - odd))
        # mux: the lower channel has fewer ids
        return {"modulo_add": 1 / nine_released.MODULUS, "mux": 0.5 / (V // 2 - 5)}.get(self.kind, 1 / (V - 10))


@cache
def _simulated_ceiling(task: NineProbes) -> float:
    inputs, targets = task.sample(_CEILING_SAMPLES, torch.Generator().manual_seed(0))
    answers = nine_released.best_answer(task.kind, inputs, task.vocabulary, task.operations)
    return float((answers == targets[:, -1]).double().mean())
