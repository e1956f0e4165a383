"""Lets transformers load PRISM's models by themselves, without `import prism` importing transformers.

`AutoConfig.from_pretrained(folder)` finds a configuration class by the name in the folder's config.json. PRISM's class is
registered at once if transformers' registry is there already, and otherwise at the moment it is first imported.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

REGISTRY = "transformers.models.auto.configuration_auto"


def register_with_transformers() -> None:
    if REGISTRY in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register() -> None:
    try:
        import_module("prism.models")  # which registers
    except ImportError as error:  # a transformers too old must still be usable for everything else
        warnings.warn(f"transformers will not know PRISM's models: {error}", stacklevel=2)


class _AfterImport(MetaPathFinder):
    """Finds nothing itself; has the registry's loader register once the registry is there, and is then gone."""

    looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != REGISTRY or self.looking:
            return None
        self.looking = True  # for the finders behind this one
        try:
            spec = find_spec(fullname)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]  # of this one loader
        return spec
