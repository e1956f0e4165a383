"""Register the engine as a backend of flash-linear-attention's gated delta rule, so that its callers get ours.

fla asks each backend whether it serves a call (the verifier) and uses its own kernels where none does, silently.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from prism.hf.delta import Result, chunk_gated_delta_rule

OPERATION, TYPE = "gated_delta_rule", "prism"
_UNSERVED = (
    "cp_context",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "state_v_first",
    "transpose_state_layout",
)


def register(undo: list[Callable[[], None]]) -> str | None:
    """Register once, and append how to undo it; returns why not, None if it is registered."""
    if find_spec("fla") is None:
        return "it is not installed"
    try:
        backends = import_module("fla.backends")
        registry = backends._load_operation_registry(OPERATION)
        table = registry._backends
    except (ImportError, AttributeError):
        return "its registry of backends is not where version 0.6 has it"
    if TYPE not in table:
        registry.register(_backend(backends.BaseBackend))
        undo.append(lambda: table.pop(TYPE, None))
    return None


def refuses(q: Any, k: Any, v: Any, g: Any, beta: Any, *more: Any, **options: Any) -> tuple[bool, str | None]:
    """(True, None) if the engine serves a call, otherwise (False, why)."""
    if more:
        return False, "prism takes q, k, v, g, beta by position and everything else by name"
    for name in _UNSERVED:
        if options.get(name):
            return False, f"prism does not serve {name}"
    if options.get("allow_neg_eigval"):
        return False, "prism takes β as it is"
    states = options.get("initial_state") is not None or options.get("output_final_state")
    if options.get("cu_seqlens") is not None and states:
        return False, "prism returns no state per packed document"
    if g is None or g.ndim != 3:
        return False, "prism serves one decay per head"
    return True, None


def _backend(base: Any) -> Any:
    class PrismBackend(base):
        """PRISM's engine: any width, float32 too, on the CPU too."""

        backend_type = TYPE
        package_name = "prism"
        env_var = "FLA_PRISM"
        priority = 2

        def chunk_gated_delta_rule(self, q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Result:
            return chunk_gated_delta_rule(q, k, v, g, beta, **options)

        def chunk_gated_delta_rule_verifier(self, *inputs: Any, **options: Any) -> tuple[bool, str | None]:
            return refuses(*inputs, **options)

    return PrismBackend()
