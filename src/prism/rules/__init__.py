"""What is forgotten and written. One small file a rule; no loops over time.

Adding a rule is one file and its line in `_RULES`: tests, benchmarks, models and tables pick it up from here.
"""

from __future__ import annotations

from importlib import import_module

from prism.messages import did_you_mean
from prism.rules.rule import Rule

_RULES = {
    "prism": "prism.rules.prism:Prism",
    "gated_delta": "prism.rules.gated_delta:GatedDelta",
    "delta": "prism.rules.delta:Delta",
    "delta_product": "prism.rules.delta_product:DeltaProduct",
    "kda": "prism.rules.kda:Kda",
    "rwkv7": "prism.rules.rwkv7:Rwkv7",
    "linear": "prism.rules.linear:Linear",
    "retnet": "prism.rules.retention:RetNet",
    "lightning": "prism.rules.lightning:Lightning",
    "gated_retention": "prism.rules.retention:GatedRetention",
    "mamba2": "prism.rules.mamba:Mamba2",
    "gla": "prism.rules.gla:Gla",
    "hgrn2": "prism.rules.gla:Hgrn2",
    "rwkv6": "prism.rules.rwkv6:Rwkv6",
    "mlstm": "prism.rules.mlstm:Mlstm",
    "gsa": "prism.rules.gsa:Gsa",
    "based": "prism.rules.based:Based",
    "mesa": "prism.rules.mesa:Mesa",
    "mom": "prism.rules.mom:Mom",
    "mamba1": "prism.rules.selective:Mamba1",
    "longhorn": "prism.rules.selective:Longhorn",
    "hgrn": "prism.rules.hgrn:Hgrn",
    "rg_lru": "prism.rules.rg_lru:RgLru",
    "s4d": "prism.rules.s4d:S4d",
    "slstm": "prism.rules.slstm:Slstm",
    "ttt_linear": "prism.rules.ttt:TttLinear",
    "ttt_mlp": "prism.rules.ttt:TttMlp",
    "titans": "prism.rules.titans:Titans",
    "atlas": "prism.rules.atlas:Atlas",
    "softmax": "prism.rules.softmax:Softmax",
    "sliding_window": "prism.rules.softmax:SlidingWindow",
    "hstu": "prism.rules.hstu:Hstu",
}


def names() -> tuple[str, ...]:
    """The names of all rules, PRISM first."""
    return tuple(_RULES)


def get(name: str) -> type[Rule]:
    """The rule's class: `objective`, `forgetting`, `transition`, `forms`; its instances know `state_size`, `write_rank`."""
    if name not in _RULES:
        hint = did_you_mean(str(name), _RULES)
        raise ValueError(f"unknown rule {name!r}{hint}: choose from {', '.join(_RULES)}")
    module, attribute = _RULES[name].split(":")
    rule: type[Rule] = getattr(import_module(module), attribute)
    return rule


__all__ = ["Rule", "get", "names"]
