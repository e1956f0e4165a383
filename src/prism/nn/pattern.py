"""Layer patterns: a stack of rules as a string, `"prism*3+softmax"` or `"prism(steps=1)*3+prism(steps=2)"`, or as a list.

A pattern is one period. It is repeated, and truncated, to the requested number of layers. Options of a layer override those
that its rule has everywhere. Values are written as in TOML; quotes around a word may be left out.

    pattern = term ("+" term)*          term = rule ["(" option=value, … ")"] ["*" count]
    list    = entries that are a rule's name, {"rule": name, option: value, …} or (name, {option: value, …})
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from prism import rules
from prism.overrides import read_toml_value


class LayerSpec(NamedTuple):
    """One layer: its rule and the options that belong to this layer alone."""

    rule: str
    options: dict[str, Any]


def parse_layers(layers: str | Sequence[Any], count: int | None = None) -> list[LayerSpec]:
    """The layers of a stack with `count` layers (None: one period).

    >>> [layer.rule for layer in parse_layers("prism*2+softmax", 4)]
    ['prism', 'prism', 'softmax', 'prism']
    """
    period = _parse_string(layers) if isinstance(layers, str) else _parse_list(layers)
    if count is None:
        return period
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"num_hidden_layers must be an integer ≥ 1, got {count!r}")
    return [period[i % len(period)] for i in range(count)]


def format_layers(layers: Sequence[LayerSpec]) -> str:
    """The pattern of a stack: the inverse of `parse_layers`.

    >>> format_layers(parse_layers("prism(steps=1)*2+softmax"))
    'prism(steps=1)*2+softmax'
    """
    terms: list[tuple[str, int]] = []
    for rule, options in layers:
        inner = ", ".join(f"{name}={_format_value(name, value)}" for name, value in options.items())
        term = f"{rule}({inner})" if inner else rule
        same = bool(terms) and terms[-1][0] == term
        terms[-1 if same else len(terms) :] = [(term, terms[-1][1] + 1 if same else 1)]
    return "+".join(term if count == 1 else f"{term}*{count}" for term, count in terms)


def _format_value(name: str, value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if read_toml_value(text) != value or set(text) & set("()" if isinstance(value, list) else "(),"):
        raise ValueError(f"option {name} is {value!r}, which cannot be written in a pattern of layers")
    return text


_TERM = re.compile(r"(?P<rule>[^()*]+)(\((?P<options>[^()]*)\))?\s*(\*\s*(?P<count>[0-9]+))?")


def _parse_string(pattern: str) -> list[LayerSpec]:
    period: list[LayerSpec] = []
    for term in re.split(r"\+(?![^(]*\))", pattern):  # not inside parentheses
        found = _TERM.fullmatch(term.strip())
        if found is None or (found["count"] is not None and int(found["count"]) == 0):
            raise ValueError(
                f"layers has the pattern {pattern!r}, where {term.strip()!r} is not a rule or rule*count; "
                "write for example 'prism*3+softmax' or 'prism(steps=1)*3+prism(steps=2)'"
            )
        layer = _layer(found["rule"].strip(), _parse_options(found["options"] or "", pattern))
        period += [layer] * int(found["count"] or 1)
    return period


def _parse_options(text: str, pattern: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in re.split(r",(?![^\[]*\])", text))):  # not inside brackets
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value) or name in options:
            raise ValueError(
                f"layers has the pattern {pattern!r}, where {item!r} is not one option=value; "
                "write for example 'prism(steps=2, keys=previous)'"
            )
        options[name] = read_toml_value(value)
    return options


def _parse_list(entries: Sequence[Any]) -> list[LayerSpec]:
    if not isinstance(entries, Sequence) or not entries:
        raise ValueError(f"layers must be a pattern such as 'prism*3+softmax' or a list of rules, got {entries!r}")
    return [_parse_entry(entry) for entry in entries]


def _parse_entry(entry: Any) -> LayerSpec:
    if isinstance(entry, str):
        return _layer(entry, {})
    if isinstance(entry, dict) and isinstance(entry.get("rule"), str):
        return _layer(entry["rule"], {name: value for name, value in entry.items() if name != "rule"})
    if isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], dict):
        return _layer(entry[0], dict(entry[1]))
    raise ValueError(
        f"layers has the entry {entry!r}: expected a rule's name, {{'rule': name, option: value}} or (name, options)"
    )


def _layer(name: str, options: dict[str, Any]) -> LayerSpec:
    rules.get(name)  # raises for an unknown rule, before anything is built
    return LayerSpec(name, options)
