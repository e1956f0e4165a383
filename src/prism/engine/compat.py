"""Wrap every torch name that some versions lack (private or new), each with a fallback.

Such names are looked up at the call, never imported: a rename in torch costs speed or a special case, not `import prism`.
Each function says what it does without the name. Names of Triton are in the kernels, names of transformers in
`prism.models.compat`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.modules.module as torch_module
import torch.utils
from torch import Tensor, nn
from torch.autograd import forward_ad

TRANSFORMS = "_are_functorch_transforms_active"
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
REGISTRIES = ("_parameters", "_buffers", "_modules")


def transforms_active(*values: Any) -> bool:
    """Whether a `torch.func` transform (vmap, grad, jvp) is running.

    Fallback: whether a tensor among `values` is wrapped by a transform; such a tensor has no storage. In compiled code the
    fallback is yes: callers then take the path that is right for both, and slower.
    """
    active = getattr(torch._C, TRANSFORMS, None)
    if active is not None:
        return active()
    return torch.compiler.is_compiling() or any(isinstance(z, Tensor) and not _has_storage(z) for z in values)


def _has_storage(x: Tensor) -> bool:
    try:
        x.untyped_storage()
    except NotImplementedError:
        return False
    return True


def is_exporting() -> bool:
    """Whether `torch.export` is tracing. Fallback (before torch 2.7): no."""
    active = getattr(torch.compiler, "is_exporting", None)
    return active is not None and active()


def in_dispatch_mode() -> bool:
    """Whether a `TorchDispatchMode` may be active. Fallback: yes, so that operators are called through torch."""
    module = getattr(torch.utils, "_python_dispatch", None)
    active = getattr(module, "is_in_torch_dispatch_mode", None)
    return True if active is None else active()


def have_tangents(*values: Any) -> bool:
    """Whether one of these has a tangent (forward-mode AD).

    The private level only saves time outside forward mode. Fallback: check every tensor.
    """
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    return any(isinstance(z, Tensor) and forward_ad.unpack_dual(z).tangent is not None for z in values)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, in one kernel. Fallback: one kernel each."""
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None:
        together(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def forward_hooks(modules: Iterable[nn.Module]) -> list[dict[Any, Any]] | None:
    """The live dictionaries of forward hooks, global ones first. Fallback: None, unknown."""
    found = [getattr(torch_module, name, None) for name in GLOBAL_HOOKS]
    found += [getattr(m, name, None) for m in modules for name in FORWARD_HOOKS]
    return None if any(hooks is None for hooks in found) else found  # type: ignore[return-value]


def registries(modules: Iterable[nn.Module]) -> list[dict[str, Any]] | None:
    """The live dictionaries of parameters, buffers and children. Fallback: None, unknown."""
    found = [getattr(m, name, None) for m in modules for name in REGISTRIES]
    return None if any(registry is None for registry in found) else found  # type: ignore[return-value]


def untouched(m: nn.Module) -> bool:
    """Whether m has no hooks and no instance `forward` (accelerate sets one to fetch weights).

    Fallback: no, so that m is called normally.
    """
    for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS):
        if getattr(m, name, True):
            return False
    return "forward" not in m.__dict__
