"""Register PRISM's configurations and models with transformers' Auto classes.

Configurations are registered at once. Models are heavier to import: they are registered when the first configuration of
their kind is created, which is before an Auto class looks for them.
"""

from __future__ import annotations

from transformers.models.auto.configuration_auto import AutoConfig

from prism.models.config import PrismConfig, PrismRecConfig

_registered: set[type[PrismConfig]] = set()


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


AutoConfig.register("prism", PrismConfig, exist_ok=True)
AutoConfig.register("prism_rec", PrismRecConfig, exist_ok=True)
PrismConfig.on_creation.append(register_models)
