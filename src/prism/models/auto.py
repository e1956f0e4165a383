"""Register PRISM's configurations and models with transformers' Auto classes.

Configurations are registered at once. Models are heavier to import: they are registered when the first configuration of
their kind is created, which is before an Auto class looks for them.

A program that does not import prism finds none of this. For it an exported folder names its classes in config.json, as models
with code do (`auto_map`): transformers then asks for `trust_remote_code=True`, not for an upgrade.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import transformers

from prism.files import read_json, write_json
from prism.models.config import PrismConfig

_waiting: dict[type, dict[str, str]] = {}
_CODE = "modeling_prism"
# In `try`: for a plain import transformers advises `pip install prism`, which is another project.
_SOURCE = '''"""The classes of this model, which are in the package prism."""

try:
    from prism.models import PrismConfig, PrismForCausalLM, PrismModel
except ModuleNotFoundError as error:
    raise ImportError(f"this model needs the package prism (found: {error}): install prism from its repository") from error

__all__ = ["PrismConfig", "PrismForCausalLM", "PrismModel"]
'''


def register(kind: type[PrismConfig], **models: str) -> None:
    """Register a kind of configuration, and models of it, `AutoModel="module:class"`, when the first one is created."""
    # Imported here: the first import makes prism.autoload import recommend.config, which calls this function.
    from transformers.models.auto.configuration_auto import AutoConfig

    AutoConfig.register(kind.model_type, kind, exist_ok=True)
    _waiting[kind] = models


def register_models(config: PrismConfig) -> None:
    """Register the models of this kind of configuration with transformers' Auto classes."""
    for kind in type(config).__mro__:
        for auto, home in _waiting.pop(kind, {}).items():
            module, name = home.split(":")
            getattr(transformers, auto).register(kind, getattr(import_module(module), name), exist_ok=True)


def name_classes(folder: Path) -> None:
    """Name the classes of the language model in a folder, for programs that do not import prism."""
    classes = {"AutoConfig": "PrismConfig", "AutoModel": "PrismModel", "AutoModelForCausalLM": "PrismForCausalLM"}
    named = {auto: f"{_CODE}.{name}" for auto, name in classes.items()}
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "auto_map": named})
    (folder / f"{_CODE}.py").write_text(_SOURCE, encoding="utf-8")


register(
    PrismConfig,
    AutoModel="prism.models.language:PrismModel",
    AutoModelForCausalLM="prism.models.language:PrismForCausalLM",
)
PrismConfig.on_creation.append(register_models)
