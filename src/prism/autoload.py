"""Register PRISM's models with transformers and peft, without importing either.

`AutoConfig.from_pretrained(folder)` finds a configuration class by the name in the folder's config.json. By the same name peft
finds the linear maps that LoRA adapts. Both tables are extended at once if their module is already imported, and otherwise when
it is first imported.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

REGISTRY = "transformers.models.auto.configuration_auto"
LORA = "peft.utils.constants"
LORA_TABLE = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"
LORA_TARGETS = (
    r".*\.mlp\.(gate|up|down)"
    r"|.*\.rule\.(qkv|qk|uvqk|receptance|into|up|branch|out)"
    r"|.*\.rule\.inner\.(qkv\.first|qkv\.maps\.\d+|out)"
)
"""The linear maps that LoRA adapts by default, as a pattern of whole names: those to queries, keys and values, the output, and
the SwiGLUs. Gates and small maps stay as they are, and on the fast path; so do `key` and `value` of RWKV, which in mLSTM are
no linear maps."""


def register_with_transformers() -> None:
    """Register now, or install import hooks that register once the tables of transformers and peft are imported."""
    for module, register in ((REGISTRY, _register), (LORA, _register_lora)):
        if module in sys.modules:
            register()
        elif not any(isinstance(finder, _AfterImport) and finder.module == module for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport(module, register))


def _register() -> None:
    try:
        import_module("prism.recommend.config")  # registers on import, and so does prism.models, which it imports
    except ImportError as error:  # a transformers too old must still work for everything else
        warnings.warn(f"PRISM's models are not registered with transformers: {error}", stacklevel=2)


def _register_lora() -> None:
    """Add our models to peft's table. Another version of peft may have none: LoRA then needs `target_modules`."""
    table = getattr(sys.modules[LORA], LORA_TABLE, None)
    if isinstance(table, dict):
        table.setdefault("prism", LORA_TARGETS)
    else:
        warnings.warn(f"this peft has no {LORA}.{LORA_TABLE}: pass target_modules for PRISM's models", stacklevel=2)


class _AfterImport(MetaPathFinder):
    """An import hook that finds no module itself. It makes the loader of `module` call `register`, then removes itself."""

    def __init__(self, module: str, register: Callable[[], None]) -> None:
        self.module, self.register = module, register
        self.searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module or self.searching:
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
                self.register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]  # of this loader only
        return spec
