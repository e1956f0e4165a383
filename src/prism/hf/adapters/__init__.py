"""Adapters that add PRISM's writes 2 … L to the Gated DeltaNet layers of a trained model, for peft.

    from peft import get_peft_model
    from prism.hf.adapters import PrismAdapterConfig

    model = get_peft_model(model, PrismAdapterConfig(steps=2, rank=16))

Read branch.py first: the mathematics. tuner.py finds and wraps the layers, rule.py those of this library and delta_net.py
those of transformers; slots.py keeps their states in a cache. Import this package before a saved adapter is loaded, so that
peft knows its type.
"""

from prism.messages import needs_extra

with needs_extra("prism.hf.adapters", "adapters"):
    from peft.utils import register_peft_method

    from prism.hf.adapters.compat import add_peft_type
    from prism.hf.adapters.config import NAME, PrismAdapterConfig
    from prism.hf.adapters.tuner import PrismTuner

add_peft_type(NAME)
register_peft_method(name=NAME.lower(), config_cls=PrismAdapterConfig, model_cls=PrismTuner, prefix=PrismTuner.prefix)

__all__ = ["PrismAdapterConfig", "PrismTuner"]
