"""The registry of rules. A rule says what a memory forgets and writes.

A rule inside the package is a class in one of these files and a line in `_RULES`: tests, benchmarks, models and tables find
it here. A rule outside the package is a subclass of `Rule` that is added with `register`, or found by outside.py. Start with
rule.py (what a rule is), then gla.py (decay and add) and delta.py (erase and write).
"""

from __future__ import annotations

from importlib import import_module

from prism.messages import did_you_mean
from prism.rules import outside
from prism.rules.description import HEADS, WIDTH, Description, description_of
from prism.rules.options import Option
from prism.rules.rule import Rule, set_rule_lookup

_RULES = {
    "prism": "prism.rules.prism:Prism",
    "gated_delta": "prism.rules.delta:GatedDelta",
    "delta": "prism.rules.delta:Delta",
    "efla": "prism.rules.efla:Efla",
    "delta_product": "prism.rules.delta_product:DeltaProduct",
    "comba": "prism.rules.comba:Comba",
    "kda": "prism.rules.kda:Kda",
    "gdn2": "prism.rules.kda:Gdn2",
    "rwkv7": "prism.rules.rwkv:Rwkv7",
    "linear": "prism.rules.linear:Linear",
    "retnet": "prism.rules.retention:RetNet",
    "lightning": "prism.rules.lightning:Lightning",
    "gated_retention": "prism.rules.retention:GatedRetention",
    "mamba2": "prism.rules.mamba:Mamba2",
    "mamba3": "prism.rules.mamba3:Mamba3",
    "gla": "prism.rules.gla:Gla",
    "hgrn2": "prism.rules.gla:Hgrn2",
    "rwkv6": "prism.rules.rwkv:Rwkv6",
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
    "titans": "prism.rules.neural_memory:Titans",
    "atlas": "prism.rules.neural_memory:Atlas",
    "softmax": "prism.rules.softmax:Softmax",
    "sliding_window": "prism.rules.softmax:SlidingWindow",
    "hstu": "prism.rules.hstu:Hstu",
}

_REGISTERED: dict[str, type[Rule]] = {}
"""Rules from outside the package."""


def names() -> tuple[str, ...]:
    """The names of all rules, PRISM first, those from outside the package last."""
    return tuple(dict.fromkeys([*_RULES, *_REGISTERED, *outside.installed()]))


def register(name: str, rule: type[Rule]) -> None:
    """Register your own rule under a name, for `Mixer`, layer patterns, configurations and `prism rules`.

    Registering the same class again, or a class of the same module and name (a notebook cell run twice), replaces it. A
    saved model with such a rule loads once the rule is registered.

    Args:
        name: its name in patterns and configurations; a Python identifier that no other rule has.
        rule: a subclass of `Rule` with `update` and `output`, built as `rule(width, heads, **options)`.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name must be an identifier such as 'my_rule', got {name!r}")
    _check_class(rule)
    if rule.name not in (name, rule.__name__):
        raise ValueError(f"{rule.__name__} already has the name {rule.name!r}: register it as that, or subclass it")
    old = _REGISTERED.get(name)
    known = old is not None and (old.__module__, old.__qualname__) == (rule.__module__, rule.__qualname__)
    if name in _RULES or (old is not None and not known):
        raise ValueError(f"there is already a rule {name!r}: choose another name")
    rule.name = name
    _REGISTERED[name] = rule


def get(name: str | type[Rule]) -> type[Rule]:
    """The rule's class, with `objective`, `forgetting`, `transition`, `forms`; instances have `state_size`, `write_rank`.

    Args:
        name: one of `names()`, or a subclass of `Rule`, which is returned unchanged.
    """
    if isinstance(name, type):
        return _check_class(name)
    if not isinstance(name, str) or name not in _RULES:
        found = _from_outside(name) if isinstance(name, str) else None
        if found is not None:
            return found
        base, _, options = str(name).partition(":")
        if base in _RULES:
            raise ValueError(
                f"unknown rule {name!r}: give options as arguments, {base!r}, {options.replace(',', ', ')}"
            )
        hint = did_you_mean(str(name), names())
        raise ValueError(
            f"unknown rule {name!r}{hint}: choose from {', '.join(names())}, "
            "or give --import MODULE with a module that registers your own by prism.rules.register(name, class)"
        )
    module, attribute = _RULES[name].split(":")
    rule: type[Rule] = getattr(import_module(module), attribute)
    return rule


def describe(name: str | type[Rule], width: int = WIDTH, heads: int = HEADS) -> Description:
    """Everything to know about a rule: equation, paper, state size, forms, and every option with its meaning.

    The result prints as text. It is also the tuple of the rule's options: name, type, default and meaning.

    Args:
        name: one of `names()`, or a subclass of `Rule`.
        width: width of the layer for which the state size is given.
        heads: number of its heads.

    >>> rule = describe("gla")
    >>> rule.equation.splitlines()[0], rule.state_size
    ('S_t = Diag(α_t) S_{t-1} + k_t v_tᵀ', 131072)
    >>> [option.name for option in rule]
    ['key_dim', 'value_dim', 'gate_rank', 'conv_size']
    """
    return description_of(get(name), width, heads)


def _from_outside(name: str) -> type[Rule] | None:
    """A registered rule; one that is not is looked for in named modules, then in installed packages."""
    if name not in _REGISTERED:
        outside.import_named_modules()
    if name not in _REGISTERED and (found := outside.installed().get(name)) is not None:
        outside.load(found, register)
    return _REGISTERED.get(name)


def _check_class(rule: type) -> type[Rule]:
    if not isinstance(rule, type) or not issubclass(rule, Rule):
        shown = f"the class {rule.__name__}" if isinstance(rule, type) else f"a {type(rule).__name__}"
        raise ValueError(f"a rule must be a subclass of prism.rules.Rule, got {shown}")
    missing = [method for method in ("update", "output") if getattr(rule, method) is getattr(Rule, method)]
    if missing:
        raise ValueError(f"the rule {rule.__name__} does not define {' and '.join(missing)}")
    return rule


set_rule_lookup(get)

__all__ = ["Description", "Option", "Rule", "describe", "get", "names", "register"]
