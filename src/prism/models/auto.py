"""Register PRISM's configurations and models with transformers' Auto classes.

Configurations are registered at once. Models are heavier to import: they are registered when the first configuration of
their kind is created, which is before an Auto class looks for them.

A program that does not import prism finds none of this. For it an exported folder names its classes in config.json, as models
with code do (`auto_map`): transformers then asks for `trust_remote_code=True`, not for an upgrade.
"""

from __future__ import annotations

from pathlib import Path

from transformers.models.auto.configuration_auto import AutoConfig

from prism.files import read_json, write_json
from prism.models.config import PrismConfig, PrismRecConfig

_registered: set[type[PrismConfig]] = set()
_CODE = "modeling_prism"
# In `try`: for a plain import transformers advises `pip install prism`, which is another project.
_SOURCE = '''"""The classes of this model, which are in the package prism."""

try:
    from prism.models import PrismConfig, PrismForCausalLM, PrismModel
except ModuleNotFoundError as error:
    raise ImportError(f"this model needs the package prism (found: {error}): install prism from its repository") from error

__all__ = ["PrismConfig", "PrismForCausalLM", "PrismModel"]
'''


def register_models(config: PrismConfig) -> None:
    """Register the models of this kind of configuration with `AutoModel` and `AutoModelForCausalLM`."""
    kind = PrismRecConfig if isinstance(config, PrismRecConfig) else PrismConfig
    if kind in _registered:
        return
    from transformers import AutoModel, AutoModelForCausalLM

    if kind is PrismRecConfig:
        from prism.models.recommender import PrismForRecommendation

        AutoModel.register(PrismRecConfig, PrismForRecommendation, exist_ok=True)
    else:
        from prism.models.language import PrismForCausalLM, PrismModel

        AutoModel.register(PrismConfig, PrismModel, exist_ok=True)
        AutoModelForCausalLM.register(PrismConfig, PrismForCausalLM, exist_ok=True)
    _registered.add(kind)


def name_classes(folder: Path) -> None:
    """Name the classes of the language model in a folder, for programs that do not import prism."""
    classes = {"AutoConfig": "PrismConfig", "AutoModel": "PrismModel", "AutoModelForCausalLM": "PrismForCausalLM"}
    named = {auto: f"{_CODE}.{name}" for auto, name in classes.items()}
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "auto_map": named})
    (folder / f"{_CODE}.py").write_text(_SOURCE, encoding="utf-8")


AutoConfig.register("prism", PrismConfig, exist_ok=True)
AutoConfig.register("prism_rec", PrismRecConfig, exist_ok=True)
PrismConfig.on_creation.append(register_models)
