"""`AdapterLayer`: a Gated DeltaNet layer with named branches, as PEFT expects of an adapted layer."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from prism.hf.adapters.branch import Branch, Sizes
from prism.hf.adapters.config import PrismAdapterConfig

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

MERGING = (
    "a PRISM adapter cannot be merged: its writes have keys and values of their own, which no weight of the base layer can "
    "express; keep the adapter, and use disable_adapter() or unload() for the base model"
)


class AdapterLayer(nn.Module, BaseTunerLayer):
    """Base of the layers that carry branches. What is not defined here is the base layer's.

    Args:
        base_layer: the layer.
        sizes: its sizes.
        active: the adapters that are active in the model.
    """

    adapter_layer_names = ("prism_branches",)
    base_layer: Any

    def __init__(self, base_layer: nn.Module, sizes: Sizes, active: list[str]) -> None:
        super().__init__()
        self.base_layer = base_layer  # the first child: the dtype of a layer is read from its first linear map
        self.prism_branches = nn.ModuleDict()
        self.sizes = sizes
        self._disable_adapters = False
        self._active_adapter: str | list[str] = list(active)
        self.merged_adapters: list[str] = []
        self.train(base_layer.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":
                raise
            return getattr(super().__getattr__("base_layer"), name)

    def update_layer(self, adapter_name: str, config: PrismAdapterConfig) -> None:
        """Add a branch."""
        branch = Branch(self.sizes, config)
        like = next((p for p in self.base_layer.parameters() if p.ndim > 1), next(self.base_layer.parameters()))
        dtype = like.dtype if like.dtype in _FLOATS else torch.float32  # quantised weights
        if like.device.type != "meta" and not any(p.is_meta for p in branch.parameters()):
            branch = branch.to(like.device)
        self.prism_branches[adapter_name] = branch.to(dtype)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def active_branches(self) -> dict[str, Branch]:
        """The branches that take part in the forward pass, by name."""
        if self.disable_adapters:
            return {}
        return {name: self.prism_branches[name] for name in self.active_adapters if name in self.prism_branches}  # type: ignore[misc]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        raise ValueError(MERGING)

    def unmerge(self) -> None:
        """Nothing is ever merged."""
