"""Call private torch functions, each with a fallback for a torch version that no longer has it.

Private names are looked up at the call, never imported. A rename in torch then costs speed or a special case, and does not
break `import prism`. Each docstring says what the fallback does. Functions that only newer torch versions have are here too.

Every library has one such file, because of what each layer may import:

| file | library | why it is separate |
|---|---|---|
| `engine/compat.py` | torch | everything above the engine may import it |
| `engine/kernels/compat.py` | Triton | `import prism` must not import Triton |
| `models/compat.py` | transformers | the engine needs torch only |

Tests keep private names of a library inside its file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.modules.module as torch_module
import torch.utils
from torch import Tensor, nn
from torch.autograd import forward_ad

EXPORTING = "is_exporting"
SAVED_TENSOR_HOOKS = "_top_saved_tensors_default_hooks"
TRANSFORMS = "_are_functorch_transforms_active"
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
REGISTRIES = ("_parameters", "_buffers", "_modules")


def transforms_active(*values: Any) -> bool:
    """Whether a `torch.func` transform (vmap, grad, jvp) is running.

    Fallback: whether a transform wraps one of the tensors in `values`; a wrapped tensor has no storage. In compiled code the
    fallback is True: callers then take the path that is correct in both cases, and slower.
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


def in_dispatch_mode() -> bool:
    """Whether a `TorchDispatchMode` may be active. Fallback: True, so that operators are called through torch."""
    module = getattr(torch.utils, "_python_dispatch", None)
    active = getattr(module, "is_in_torch_dispatch_mode", None)
    return True if active is None else active()


def dispatch_mode() -> Any:
    """torch's class `TorchDispatchMode`. Fallback: None, so that nothing is recorded."""
    return getattr(getattr(torch.utils, "_python_dispatch", None), "TorchDispatchMode", None)


def saved_tensor_hooks_active() -> bool:
    """Whether someone's saved-tensor hooks are active (gradient checkpointing, `save_on_cpu`).

    Fallback: False; hooks entered inside theirs then replace them.
    """
    top = getattr(getattr(torch._C, "_autograd", None), SAVED_TENSOR_HOOKS, None)
    return top is not None and top(False) is not None


def is_exporting() -> bool:
    """Whether `torch.export` is tracing. Fallback (before torch 2.7): False."""
    exporting = getattr(torch.compiler, EXPORTING, None)
    return False if exporting is None else exporting()


def have_tangents(*values: Any) -> bool:
    """Whether one of the values carries a forward-mode tangent.

    The private level only saves time outside forward mode. Fallback: look at every tensor.
    """
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    return any(isinstance(z, Tensor) and forward_ad.unpack_dual(z).tangent is not None for z in values)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target with one kernel for all. Fallback: one kernel per pair."""
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None:
        together(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def zero_all(tensors: list[Tensor]) -> None:
    """Set tensors to zero in place with one kernel for all. Fallback: one kernel each."""
    together = getattr(torch, "_foreach_zero_", None)
    if together is not None:
        together(tensors)
        return
    for tensor in tensors:
        tensor.zero_()


def forward_hooks(modules: Iterable[nn.Module]) -> list[dict[Any, Any]] | None:
    """Torch's own dictionaries of forward hooks, the global ones first. Fallback: None, unknown."""
    kept = [getattr(torch_module, name, None) for name in GLOBAL_HOOKS]
    kept += [getattr(m, name, None) for m in modules for name in FORWARD_HOOKS]
    return None if any(hooks is None for hooks in kept) else kept  # type: ignore[return-value]  # none is None


def registries(modules: Iterable[nn.Module]) -> list[dict[str, Any]] | None:
    """Torch's own dictionaries of parameters, buffers and submodules. Fallback: None, unknown."""
    kept = [getattr(m, name, None) for m in modules for name in REGISTRIES]
    return None if any(registry is None for registry in kept) else kept  # type: ignore[return-value]  # none is None


def is_unmodified(m: nn.Module) -> bool:
    """Whether m has no hooks and no `forward` set on the instance (accelerate sets one to fetch weights).

    Fallback: False, so that m is called the ordinary way.
    """
    for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS):
        if getattr(m, name, True):
            return False
    return "forward" not in m.__dict__
