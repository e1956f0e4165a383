"""Early stopping: which step was the best so far, and for how many validations there was no better one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Best:
    """Kept in every checkpoint, so that a resumed run stops where it would have.

    Args:
        patience: validations in a row without a new best that end the run; 0: none does, and nothing is kept.
    """

    patience: int
    step: int | None = None
    quality: float | None = None
    stale: int = 0

    def note(self, step: int, quality: float) -> bool:
        """Hear of a validation; True if it is the best so far. NaN never is."""
        if not self.patience:
            return False
        if quality == quality and (self.quality is None or quality > self.quality):
            self.step, self.quality, self.stale = step, quality, 0
            return True
        self.stale += 1
        return False

    @property
    def run_out(self) -> bool:
        return 0 < self.patience <= self.stale

    def state(self) -> dict[str, Any]:
        best = None if self.step is None else {"step": self.step, "quality": self.quality}
        return {"best": best, "stale": self.stale}

    def restore(self, state: dict[str, Any]) -> None:
        """Of a run without patience nothing was kept, and one that gives it up forgets."""
        best = state.get("best")
        if self.patience and best is not None:
            self.step, self.quality, self.stale = best["step"], best["quality"], state["stale"]
