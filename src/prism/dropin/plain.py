"""Say whether a module of a model may be computed from its weights, without calling it.

LoRA, quantisation, offloading and hooks change what a call does. Where one of them may be at work, the module is called.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prism.dropin.norms import traced


def is_plain(module: nn.Module) -> bool:
    """Whether a call of the module runs its class's `forward` and nothing else, on parameters in float32 on a CPU."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        *_EVERYWHERE,
    )
    if any(hooks) or "forward" in module.__dict__ or hasattr(module, "_hf_hook"):
        return False
    return all(_ordinary(parameter) for parameter in module._parameters.values() if parameter is not None)


def is_linear(module: nn.Module) -> bool:
    """Whether a plain module is a linear map without a bias."""
    return type(module) is nn.Linear and module.bias is None and is_plain(module)


def untouched(*given: Tensor) -> bool:
    """Whether operations on these tensors run as written: on a CPU in float32, not traced, without autocast."""
    return not traced(*given) and all(_ordinary(x) for x in given) and not torch.is_autocast_enabled("cpu")


def _ordinary(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.device.type == "cpu"


_EVERYWHERE = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_backward_hooks,
    nn.modules.module._global_backward_pre_hooks,
)
"""Hooks of all modules. The dictionaries are filled and emptied, never replaced."""
