"""Finds rules that are not in this package: in modules that the user names, and in installed packages.

--import MODULE, or imports = ["MODULE"] in a plan     a module that calls `prism.rules.register`
entry point NAME = "MODULE:Class", group prism.rules   a package that brings a rule
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

GROUP = "prism.rules"
VARIABLE = "PRISM_IMPORT"
"""The environment variable with the modules, separated by commas: processes that this one starts find their rules by it."""


def import_modules(names: Iterable[str]) -> None:
    """Import modules that register rules, and let processes started from now on find those rules.

    The current folder is searched first, as by `python -m`.
    """
    for name in names:
        _import(name)
        known = named_modules()
        if name not in known:
            os.environ[VARIABLE] = ",".join([*known, name])


def import_named_modules() -> None:
    """Import what the environment variable names."""
    for name in named_modules():
        _import(name)


def named_modules() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]


def _import(name: str) -> None:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        import_module(name)
    except Exception as error:  # whatever the user's own code raises
        raise ValueError(
            f"--import {name} failed with {_reason(error)}: name a module as Python does (own_rule, not own_rule.py), in the "
            "current folder or installed"
        ) from error


def installed() -> dict[str, EntryPoint]:
    """The rules that installed packages bring, by name; none is imported."""
    return {found.name: found for found in entry_points(group=GROUP)}


def load(found: EntryPoint, register: Callable[[str, Any], None]) -> None:
    """Register the class behind an entry point."""
    try:
        register(found.name, found.load())
    except Exception as error:
        package = found.dist.name if found.dist is not None else found.value
        raise ValueError(
            f"the rule {found.name!r} of the package {package} cannot be loaded: {_reason(error)}; repair the package or "
            "uninstall it"
        ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__} ({' '.join(str(error).split())})"
