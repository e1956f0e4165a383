"""`AdaptedRule`: a Gated DeltaNet rule of this library with adapters.

Its memory is `Superposed`: the sum of the base's and of each active adapter's, with a state for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from prism.engine import Update, memory
from prism.engine.memory import Engine, register
from prism.engine.token import DeltaWeights
from prism.hf.adapters.branch import First, Sizes
from prism.hf.adapters.layer import AdapterLayer
from prism.rules.delta import GatedDelta
from prism.rules.parts import Carry
from prism.rules.prism import Prism
from prism.rules.rule import Rule, Span

BASE = "base"
_ADAPTER = "adapter."


@dataclass(frozen=True, eq=False)
class Superposed:
    """The base layer's update, and those of the active adapters by name."""

    base: Update
    branches: dict[str, Update] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.base.tokens


def check_superposed(update: Superposed, state: Any) -> None:
    """A state must be the base layer's tensor, or a dict of it and the adapters'."""
    if isinstance(state, dict) and BASE not in state:
        raise ValueError(f"state must hold the memory {BASE!r} of the base layer, got {', '.join(state) or 'nothing'}")


def superpose(update: Superposed, state: Any, form: str, backend: str) -> tuple[Tensor, Any]:
    """The sum of all outputs, and the states of those that computed it.

    An adapter that is not active loses its state, since it would miss this call's tokens: it starts again with an empty one.
    """
    before = state if isinstance(state, dict) else {BASE: state}
    o, new = memory(update.base, before[BASE], form, backend)
    after = {BASE: new}
    for name, branch in update.branches.items():
        added, after[_ADAPTER + name] = memory(branch, before.get(_ADAPTER + name), form, backend)
        o = o + added.to(o.dtype)
    return o, after if update.branches else new


register(Superposed, Engine({}, choose=lambda update: "auto", check_state=check_superposed, delegate=superpose))


def sizes_of_rule(module: nn.Module) -> Sizes | None:
    """The sizes of a rule that can be adapted: `gated_delta`, and `prism` with one write; None for anything else."""
    if type(module) not in (GatedDelta, Prism) or not isinstance(module, GatedDelta) or module.write_rank != 1:
        return None
    if isinstance(module, Prism) and module.erase is not None:
        return None
    return Sizes(module.width, module.heads, module.key_dim, module.value_dim)


class AdaptedRule(AdapterLayer):
    """Takes the place of a rule in its mixer. The mixer keeps the branches' states with the base's, also in a cache."""

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Superposed, dict[str, Tensor], Any]:
        own = {name: value for name, value in carry.items() if "." not in name}
        base, carried, extra = self.base_layer.update(x, own, span)
        carried, active = dict(carried), self.active_branches()
        first = self._first(base) if active else None
        branches = {}
        for name, branch in self.prism_branches.items():
            if first is not None and name in active:
                given = {key.removeprefix(f"{name}."): z for key, z in carry.items() if key.startswith(f"{name}.")}
                branches[name], found = active[name].update(x, first, given, span)
            else:  # always the same names, so that adapters can be switched; an inactive one starts again
                found = branch.empty_carry(x)  # type: ignore[operator]
            carried |= {f"{name}.{key}": z for key, z in found.items()}
        return Superposed(base, branches), carried, extra

    @staticmethod
    def _first(base: Update) -> First:
        """The first write. A rule hands out w = β v; the branch needs v."""
        assert base.erase_strength is not None and base.log_decay is not None
        beta = base.erase_strength
        v = base.w[:, :, :, 0] / beta.clamp(min=torch.finfo(beta.dtype).tiny).unsqueeze(-1)
        return First(base.q, base.k[:, :, :, 0], v, beta, base.log_decay)

    def output(self, o: Tensor, x: Tensor, extra: Any) -> Tensor:
        return self.base_layer.output(o, x, extra)

    decode = Rule.decode  # and not the base's own

    def current_decoding_weights(self) -> DeltaWeights | None:
        """None: the kernels for one token know one memory."""
        return None
