"""`PrismTuner`: finds the layers of a model that can be adapted and wraps them. `peft.get_peft_model` calls it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from prism.hf.adapters.branch import Sizes
from prism.hf.adapters.config import PrismAdapterConfig
from prism.hf.adapters.delta_net import CLASSES, AdaptedDeltaNet, sizes_of_delta_net
from prism.hf.adapters.layer import MERGING, AdapterLayer
from prism.hf.adapters.rule import AdaptedRule, sizes_of_rule

_KINDS: tuple[tuple[Callable[[nn.Module], Sizes | None], type[AdapterLayer]], ...] = (
    (sizes_of_rule, AdaptedRule),
    (sizes_of_delta_net, AdaptedDeltaNet),
)

_WRAPPER = "base_model.model."
"""What a `PeftModel` puts before the names of the model inside."""


def adaptable(model: nn.Module) -> dict[str, Sizes]:
    """The layers of a model that can be adapted, by name, with their sizes; those that already are included."""
    found: dict[str, Sizes] = {}
    for name, module in model.named_modules():
        if name.endswith(".base_layer"):
            continue
        sizes = module.sizes if isinstance(module, AdapterLayer) else _kind_of(module)[0]
        if sizes is not None:
            found[name] = sizes
    return found


def _kind_of(module: nn.Module) -> tuple[Sizes | None, type[AdapterLayer]]:
    for sizes_of, kind in _KINDS:
        sizes = sizes_of(module)
        if sizes is not None:
            return sizes, kind
    return None, AdapterLayer


def layer_number(name: str, place: int) -> int:
    """The number of a layer in its stack, from its name; its place among the layers found if the name has none."""
    numbers = re.findall(r"(?:^|\.)layers\.(\d+)(?=\.|$)", name)
    return int(numbers[-1]) if numbers else place


class PrismTuner(BaseTuner):
    """The adapters of a model."""

    prefix = "prism_"
    tuner_layer_cls = AdapterLayer
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012  (declared this way by peft; the modules are found)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        return peft_config

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        """Choose the layers, and refuse a configuration that does not fit them."""
        config: PrismAdapterConfig = peft_config
        found = adaptable(model)
        if not found:
            known = ", ".join(CLASSES)
            raise ValueError(
                f"{type(model).__name__} has no layer that a PRISM adapter can extend: it needs Gated DeltaNet layers, as in "
                f"{known}, or rules gated_delta and prism (steps=1) of this library"
            )
        numbers = {layer_number(name, place): name for place, name in enumerate(found)}
        wanted = sorted(numbers) if config.layers is None else config.layers
        missing = [i for i in wanted if i not in numbers]
        if missing:
            raise ValueError(
                f"layers must be among the Gated DeltaNet layers {', '.join(map(str, sorted(numbers)))}, got {missing[0]}"
            )
        chosen = {numbers[i]: found[numbers[i]] for i in wanted}
        most = min(min(s.width, s.heads * s.key_dim, s.heads * s.value_dim) for s in chosen.values())
        if config.rank > most:
            raise ValueError(
                f"rank must be from 1 to {most}, the smallest size of the adapted layers, got {config.rank}"
            )
        sizes = {_plain(name): list(chosen[name]) for name in chosen}
        base = {"model_type": self.get_model_config(model).get("model_type"), "sizes": sizes}
        if config.base is not None and config.base != base:
            raise ValueError(
                f"this adapter was made for another base ({_described(config.base)}), not for {_described(base)}: load it on "
                "the model that it was made for, or make a new PrismAdapterConfig"
            )
        config.base, config.target_modules = base, list(chosen)

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, AdapterLayer):
            target.update_layer(adapter_name, peft_config)
            return
        sizes, kind = _kind_of(target)
        assert sizes is not None  # `_prepare_model` has found it
        layer = kind(target, sizes, self.active_adapters)
        layer.update_layer(adapter_name, peft_config)
        setattr(parent, target_name, layer)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        setattr(parent, child_name, new_module)  # `unload`

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        """The name of a weight in a saved adapter. It depends neither on the adapter's name nor on LoRA around the model."""
        place, found, weight = key.partition(f".prism_branches.{adapter_name}.")
        if not found:
            return super()._remove_adapter_name_from_key(key, adapter_name)
        return f"{_WRAPPER}{_plain(place)}.prism_branches.{weight}"

    def _check_merge_allowed(self) -> NoReturn:
        raise ValueError(MERGING)

    def merge_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(MERGING)


def _plain(name: str) -> str:
    """The name of a module in the base model itself, without the wrappers of peft around it."""
    return name.replace(_WRAPPER, "")


def _described(base: dict[str, Any]) -> str:
    """A base's family, layers and sizes, for an error."""
    numbers = ", ".join(str(layer_number(name, place)) for place, name in enumerate(base["sizes"]))
    sizes = " and ".join(sorted({str(Sizes(*s)) for s in base["sizes"].values()}))
    return f"{base['model_type'] or 'a model'}, layers {numbers}, {sizes}"
