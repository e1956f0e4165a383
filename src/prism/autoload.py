"""Register PRISM's models with transformers' Auto classes, without importing transformers.

`AutoConfig.from_pretrained(folder)` finds a configuration class by the name in the folder's config.json. PRISM's class is
registered at once if transformers' registry is already imported, and otherwise when it is first imported.
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
    """Register now, or install an import hook that registers once transformers' registry is imported."""
    if REGISTRY in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register() -> None:
    try:
        import_module("prism.models")  # registers on import
    except ImportError as error:  # a transformers too old must still work for everything else
        warnings.warn(f"PRISM's models are not registered with transformers: {error}", stacklevel=2)


class _AfterImport(MetaPathFinder):
    """An import hook that finds no module itself. It makes the registry's loader call `_register`, then removes itself."""

    searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != REGISTRY or self.searching:
            return None
        self.searching = True  # leave the search to the other finders
        try:
            spec = find_spec(fullname)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]  # of this loader only
        return spec
