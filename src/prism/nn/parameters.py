"""Which parameters are special: gates stay in float32, and neither they nor norms and biases are decayed.

A *gate* is a parameter that a rule owns itself (A_log, dt_bias, a skip, γ, the mix of a token shift …), as against the
weights of its maps, convolutions and norms. Gates are few, sit in exponents or near 1, and do not survive 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from prism.rules.parts import BlockLinear, ShortConv
from prism.rules.rule import Rule

_WEIGHTS = (nn.Linear, nn.Embedding, nn.RMSNorm, nn.LayerNorm, nn.GroupNorm, ShortConv, BlockLinear)
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
    """The names of parameters that an optimiser should not decay: gates, skips, norms and biases."""
    small = {name for name, parameter in module.named_parameters() if parameter.ndim < 2}
    return small | set(gates(module))


@contextmanager
def full_precision() -> Iterator[None]:
    """Where torch's default is half precision, new parameters are float32 all the same."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if dtype in _HALF else dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


@torch.no_grad()
def keep_gates_exact(module: nn.Module, before: dict[str, Tensor]) -> None:
    """After a conversion to half precision: give the gates back their float32 values, on the device they are on now."""
    for name, gate in gates(module).items():
        if gate.dtype in _HALF:
            gate.data = before[name].to(gate.device, torch.float32)


def own_start(build: Callable[[], Rule]) -> dict[str, Tensor]:
    """The parameters that a rule starts in its own way, by name: all but the weights it leaves as `nn.Linear` drew them.

    They are taken from a rule built anew, on the CPU, so that it does not matter where the model is (it may be on the meta
    device, or sharded). A bias that the rule leaves alone starts at zero.
    """
    with torch.inference_mode(False), torch.device("cpu"), full_precision():
        rule = build()
        untouched = nn.Linear(1, 1).weight._version  # writing to a tensor raises its version
    start = {name: parameter.detach() for name, parameter in rule.named_parameters()}
    for place, part in rule.named_modules():
        if isinstance(part, nn.Linear):
            if part.weight._version == untouched:
                del start[f"{place}.weight"]
            if part.bias is not None and part.bias._version == untouched:
                start[f"{place}.bias"] = torch.zeros_like(part.bias, requires_grad=False)
    return start


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter a value. A sharded one takes its shard, so that its start does not depend on how it is sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)
