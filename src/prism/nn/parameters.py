"""Special parameters: gates stay in float32; gates, norms and biases get no weight decay. And initial weights of rules.

A *gate* is a parameter that belongs directly to a rule (A_log, dt_bias, a skip, γ, the mix of a token shift …), in contrast
to the weights of its maps, convolutions and norms. Gates are few, appear in exponents or are near 1, and need more than the
8 bits of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from prism.rules.mom import MemoryMaps
from prism.rules.parts import BlockLinear, ShortConv
from prism.rules.rule import Rule, SetsWeights, uniform

_MAPS = (nn.Linear, nn.Embedding)
_MAP_WEIGHTS = ("weight", "bias")
_NORMS = (nn.RMSNorm, nn.LayerNorm, nn.GroupNorm)
_WEIGHTS = (*_MAPS, *_NORMS, ShortConv, BlockLinear)
_HALF = (torch.bfloat16, torch.float16)


def gates(module: nn.Module) -> dict[str, nn.Parameter]:
    """The gates of every rule in `module`, by name."""
    return dict(_gates(module))


def _gates(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for place, rule in module.named_modules():
        if not isinstance(rule, Rule):
            continue
        for inner, owner in rule.named_modules(prefix=place):
            if not isinstance(owner, _WEIGHTS):
                for name, parameter in owner.named_parameters(recurse=False):
                    yield (f"{inner}.{name}" if inner else name), parameter


def no_weight_decay(module: nn.Module) -> set[str]:
    """The names of parameters that an optimizer should not decay: gates, skips, norms and biases."""
    small = {name for name, parameter in module.named_parameters() if parameter.ndim < 2}
    return small | set(gates(module))


@contextmanager
def full_precision() -> Iterator[None]:
    """Create parameters in float32 even if torch's default dtype is half precision."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if dtype in _HALF else dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


@torch.no_grad()
def keep_gates_exact(module: nn.Module, before: dict[str, Tensor]) -> None:
    """Restore the gates' float32 values after a conversion to half precision, on their current device."""
    for name, gate in gates(module).items():
        if gate.dtype in _HALF:
            gate.data = before[name].to(gate.device, torch.float32)


def initial_weights(rule: Rule) -> dict[str, Tensor]:
    """New initial values of a rule's parameters, by name, except weights and biases of linear maps that it does not set.

    They are drawn on the CPU and depend on sizes alone, so that the rule's parameters may be anywhere (on the meta device, or
    sharded).
    """
    values: dict[str, Tensor] = {}
    with torch.inference_mode(False), torch.device("cpu"), full_precision():
        for place, part in reversed(list(rule.named_modules())):  # children first: a parent may override
            values |= {f"{place}.{name}" if place else name: value for name, value in _initial_of(part).items()}
    left = {
        f"{place}.{kind}" for place, part in rule.named_modules() if isinstance(part, _MAPS) for kind in _MAP_WEIGHTS
    }
    for name, _ in rule.named_parameters():
        if name not in values and name not in left:
            raise ValueError(
                f"rule {rule.name!r} does not initialise its parameter {name!r}: return a value from initial_weights()"
            )
    return values


def _initial_of(part: nn.Module) -> dict[str, Tensor]:
    if isinstance(part, ShortConv):
        bound = part.size**-0.5
        return {name: uniform(tuple(old.shape), bound) for name, old in part.named_parameters()}
    if isinstance(part, _NORMS):
        starts = {"weight": torch.ones, "bias": torch.zeros}
        return {name: starts[name](tuple(old.shape)) for name, old in part.named_parameters()}
    if not isinstance(part, SetsWeights):
        return {}
    values = part.initial_weights()
    targets = {name: _targets(part, name) for name in values}
    each: dict[str, Tensor] = {}
    for memory in range(max(map(len, targets.values()), default=0)):  # each memory of a mixture gets other values
        values = part.initial_weights() if memory else values
        each |= {targets[name][memory]: value for name, value in values.items() if memory < len(targets[name])}
    return each


def _targets(part: nn.Module, name: str) -> list[str]:
    """The full names of the parameter that `part` calls `name`: in a mixture there is one per memory."""
    place, _, leaf = name.rpartition(".")
    owner = part.get_submodule(place)
    if not isinstance(owner, MemoryMaps):
        return [name]
    return [f"{place}.maps.{memory}.{leaf}" for memory in range(len(owner.maps))]


@torch.no_grad()
def aligned_weights(rule: Rule) -> dict[str, Tensor]:
    """What `Rule.aligned_weights` makes of a rule's weights as they are now, by name, whole if those are sharded."""
    values: dict[str, Tensor] = {}
    for place, part in rule.named_modules():
        if isinstance(part, Rule):
            values |= {f"{place}.{name}" if place else name: value for name, value in _aligned_of(part).items()}
    return values


def _aligned_of(part: Rule) -> dict[str, Tensor]:
    mixed = {name: maps for name, maps in part.named_modules() if isinstance(maps, MemoryMaps)}
    values: dict[str, Tensor] = {}
    for memory in reversed(range(max((len(maps.maps) for maps in mixed.values()), default=1))):  # the first one's stay

        def pieces(name: str, memory: int = memory) -> list[str]:
            """The parameters that together are `name` of one memory."""
            place, _, leaf = name.rpartition(".")
            if place not in mixed:
                return [name]
            shared = [] if mixed[place].first is None else [f"{place}.first.{leaf}"]
            return [*shared, f"{place}.maps.{memory}.{leaf}"]

        def weight(name: str, pieces: Callable[[str], list[str]] = pieces) -> Tensor:
            return torch.cat([_whole(part.get_parameter(piece)) for piece in pieces(name)])

        for name, value in part.aligned_weights(weight).items():
            sizes = [len(part.get_parameter(piece)) for piece in pieces(name)]
            values |= zip(pieces(name), value.split(sizes), strict=True)
    return values


def _whole(parameter: Tensor) -> Tensor:
    """A parameter's value, gathered if it is sharded."""
    from torch.distributed.tensor import DTensor

    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter to a value. A sharded one takes its shard, so that initial values do not depend on the sharding."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)
