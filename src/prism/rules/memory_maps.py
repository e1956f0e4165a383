"""One rule made into several memories: what it writes and forgets by is multiplied, what it asks and answers with is not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from prism.rules.parts import BlockLinear
from prism.rules.rule import Rule


class MemoryMaps(nn.Module):
    """A linear map for each of M memories: `[B·M, T, width]` → `[B·M, T, out]`, row b·M + m by map m.

    `first` is a map that all have in common; its outputs come before the others. A plain map is one block of a
    block-diagonal one.
    """

    def __init__(self, maps: Sequence[nn.Module], first: nn.Linear | None = None) -> None:
        super().__init__()
        self.maps = nn.ModuleList(maps)
        self.first = first
        self.blocks = maps[0].blocks if isinstance(maps[0], BlockLinear) else 1

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.stack([one.weight for one in self.maps]).unflatten(1, (self.blocks, -1))  # type: ignore[misc]  # a ModuleList forgets what it holds
        rows = x.unflatten(-1, (self.blocks, -1)).unflatten(0, (-1, len(weight)))
        y = torch.einsum("bmtni,mnoi->bmtno", rows, weight).flatten(-2)
        if self.maps[0].bias is not None:
            y = y + torch.stack([one.bias for one in self.maps]).unsqueeze(1)  # type: ignore[misc]  # a ModuleList forgets what it holds
        y = y.flatten(0, 1)
        return y if self.first is None else torch.cat([self.first(x), y], -1)


def give_each_memory_its_maps(rules: list[Rule]) -> Rule:
    """The first rule, with the maps of all of them in place of its own; it then expects its batch to be B·M rows."""
    rule = rules[0]
    names = [name for name, part in rule.named_modules() if isinstance(part, (nn.Linear, BlockLinear))]
    shared = _shared_maps(rule, names)
    for name in names:
        if name.split(".")[0] in shared:
            continue
        maps = [one.get_submodule(name) for one in rules]
        place, _, leaf = name.rpartition(".")
        own = _split(maps[0], rule.query_size, len(maps)) if name in rule.query_first_maps else MemoryMaps(maps)
        setattr(rule.get_submodule(place), leaf, own)
    return rule


def _shared_maps(rule: Rule, maps: list[str]) -> tuple[str, ...]:
    """The maps that the rule declares as shared. Names that it does not have, and a missing declaration, are refused."""
    if rule.shared_maps is None and maps:
        raise ValueError(
            f"rule {rule.name!r} cannot be mixed: it has the linear maps {', '.join(maps)} and does not say which of them the "
            "memories share; set shared_maps on its class to those that ask and answer, such as ('query', 'out')"
        )
    shared = rule.shared_maps or ()
    unknown = [name for name in (*shared, *rule.query_first_maps) if not hasattr(rule, name)]
    if unknown:
        raise ValueError(
            f"shared_maps and query_first_maps of rule {rule.name!r} name {unknown[0]!r}, which it does not have"
        )
    return shared


def _split(whole: nn.Module, asked: int, memories: int) -> MemoryMaps:
    """A map to q and more in one: q becomes the memories' common one."""
    assert isinstance(whole, nn.Linear)
    rest = whole.out_features - asked
    first, *own = (nn.Linear(whole.in_features, n, bias=False) for n in (asked, *[rest] * memories))
    return MemoryMaps(own, first)
