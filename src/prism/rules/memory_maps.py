"""One rule made into several memories: what it writes and forgets by is multiplied, what it asks and answers with is not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from prism.rules.rule import Rule

_ONE_FOR_ALL = ("query", "receptance", "gate", "out")
"""Maps of a rule that ask or answer, by name; in a `qkv` of `sizes` the first rows do."""


class MemoryMaps(nn.Module):
    """A linear map for each of M memories: `[B·M, T, width]` → `[B·M, T, out]`, row b·M + m by map m.

    `first` is a map that all have in common; its outputs come before the others.
    """

    def __init__(self, maps: Sequence[nn.Module], first: nn.Linear | None = None) -> None:
        super().__init__()
        self.maps = nn.ModuleList(maps)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.stack([one.weight for one in self.maps])  # type: ignore[misc]
        y = torch.einsum("bmti,moi->bmto", x.unflatten(0, (-1, len(weight))), weight)
        if self.maps[0].bias is not None:
            y = y + torch.stack([one.bias for one in self.maps]).unsqueeze(1)  # type: ignore[misc]
        y = y.flatten(0, 1)
        return y if self.first is None else torch.cat([self.first(x), y], -1)


def give_each_memory_its_maps(rules: list[Rule]) -> Rule:
    """The first rule, with the maps of all of them in place of its own; it then expects its batch to be B·M rows."""
    rule = rules[0]
    for name in [name for name, part in rule.named_modules() if isinstance(part, nn.Linear)]:
        if name.split(".")[0] in _ONE_FOR_ALL:
            continue
        maps = [one.get_submodule(name) for one in rules]
        place, _, leaf = name.rpartition(".")
        sizes = getattr(rule, "sizes", None) if name == "qkv" else None
        setattr(
            rule.get_submodule(place), leaf, MemoryMaps(maps) if sizes is None else _split(rule.width, sizes, len(maps))
        )
    return rule


def _split(width: int, sizes: list[int], memories: int) -> MemoryMaps:
    """A map to q, k and v in one: q becomes the memories' common one."""
    first, own = nn.Linear(width, sizes[0], bias=False), sum(sizes[1:])
    return MemoryMaps([nn.Linear(width, own, bias=False) for _ in range(memories)], first)
