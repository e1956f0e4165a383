"""Offer the functions of Gated DeltaNet as a local kernel of transformers' `KernelConfig`.

The package `kernels` loads a kernel from a folder of files that define layers. The folder written here imports this module,
whose layers call our functions; each layer has the arguments of the function of transformers that it replaces.
"""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from prism.hf.conv import causal_conv1d_fn, causal_conv1d_update
from prism.hf.delta import chunk_gated_delta_rule, recurrent_gated_delta_rule
from prism.hf.families import modeling_file

MODEL = "qwen3_5"
"""The model whose functions have the arguments; they are the same in all models of the family."""
FUNCTIONS = {
    "chunk_gated_delta_rule": ("torch_chunk_gated_delta_rule", chunk_gated_delta_rule),
    "fused_recurrent_gated_delta_rule": ("torch_recurrent_gated_delta_rule", recurrent_gated_delta_rule),
    "causal_conv1d_fn": ("causal_conv1d_fn", causal_conv1d_fn),
    "causal_conv1d_update": ("causal_conv1d_update", causal_conv1d_update),
}
"""Name under which transformers registers a function → its name in the modeling file, and ours."""
_BUILD = Path("build") / "torch-universal"
_METADATA = {
    "id": "prism_dropin",
    "name": "prism-dropin",
    "version": 1,
    "license": "Apache-2.0",
    "python-depends": [],
    "backend": {"type": "cpu"},
}


def kernel_config(folder: Path | str) -> Any:
    """Write the kernel's folder, and return the `KernelConfig` for `from_pretrained(…, kernel_config=…)`.

    Needs the package `kernels`, and a device that transformers uses it on (not a CPU: `prism.accelerate` serves that).

    Args:
        folder: the kernel's folder; it may exist.
    """
    from transformers import KernelConfig

    folder = write_local_kernel(Path(folder))
    return KernelConfig({name: f"{folder}:{name}" for name in FUNCTIONS}, use_local_kernel=True)


def write_local_kernel(folder: Path) -> Path:
    """Write the kernel's folder; returns its absolute path."""
    build = folder.resolve() / _BUILD
    build.mkdir(parents=True, exist_ok=True)
    (build / "__init__.py").write_text("from prism.hf.local_kernel import layers\n", encoding="utf-8")
    (build / "metadata.json").write_text(json.dumps(_METADATA), encoding="utf-8")
    return folder.resolve()


def _layer(name: str, original: Any, ours: Any) -> type[nn.Module]:
    """A layer without state whose `forward` is our function, with the arguments of the original."""

    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        return ours(*given, **named)

    taken = inspect.signature(original.forward if isinstance(original, nn.Module) else original).parameters.values()
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = inspect.Signature([own, *taken])  # type: ignore[attr-defined]
    return type(name, (nn.Module,), {"forward": forward, "can_torch_compile": True})


def _layers() -> SimpleNamespace:
    file = import_module(modeling_file(MODEL))
    return SimpleNamespace(
        **{name: _layer(name, getattr(file, theirs), ours) for name, (theirs, ours) in FUNCTIONS.items()}
    )


def __getattr__(name: str) -> Any:
    """`layers`, made when the package `kernels` asks for it: importing this module does not import transformers."""
    if name != "layers":
        raise AttributeError(name)
    return _layers()
