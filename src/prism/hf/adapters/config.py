"""`PrismAdapterConfig`: the options of an adapter, for `peft.get_peft_model`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft import PeftConfig

from prism.engine.layer_ops import SOLVERS
from prism.hf.adapters.compat import add_peft_type
from prism.rules.parts.writes import SCALINGS
from prism.rules.rule import check_choices, check_integers

NAME = "PRISM"
KEYS = ("own", "orthogonal", "rotated", "shared")
RESIDUALS = ("anchored", "value")


@dataclass
class PrismAdapterConfig(PeftConfig):
    """Adds writes 2 … L of PRISM to the Gated DeltaNet layers of a model.

    Args:
        steps: L, the number of writes per token, the base layer's included; 2 or more.
        rank: rank of the low-rank maps from the layer's input to keys, gains and expected values.
        layers: numbers of the layers to adapt, from 0; None: all that are Gated DeltaNet.
        solver: `"closed"` or `"gelu"` (rules/prism.py).
        residual: `"anchored"` or `"value"` (rules/parts/writes.py).
        keys: keys of the new writes, `"own"`, `"orthogonal"`, `"rotated"` or `"shared"` (rules/parts/writes.py).
        scaling: γ, which starts at 0, per `"channel"` or per `"head"`.
        conv_size: size of the anchor's convolution, in tokens; 1 means none.
        target_modules, base: the adapted layers, and the base's family and sizes. Set by the adapter itself, and saved with
            it, so that it is not loaded on another base.
    """

    steps: int = 2
    rank: int = 16
    layers: list[int] | None = None
    solver: str = "closed"
    residual: str = "anchored"
    keys: str = "own"
    scaling: str = "channel"
    conv_size: int = 4
    target_modules: list[str] | None = None
    base: dict[str, Any] | None = field(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = add_peft_type(NAME)
        check_integers(2, steps=self.steps)
        check_integers(rank=self.rank, conv_size=self.conv_size)
        check_choices(
            solver=(self.solver, SOLVERS),
            residual=(self.residual, RESIDUALS),
            keys=(self.keys, KEYS),
            scaling=(self.scaling, SCALINGS[:2]),
        )
        if self.layers is not None:
            self.layers = sorted(set(self.layers))
            if not self.layers or not all(type(i) is int and i >= 0 for i in self.layers):
                raise ValueError(f"layers must be numbers ≥ 0 of layers, or None for all, got {self.layers!r}")
