"""Compute memories, exactly, in several forms. Knows no rule.

Read update.py (the normal form), linear/recurrent.py (its definition) and linear/chunkwise.py (the fast form) first.
"""

from prism.engine import implementations  # noqa: F401 - registers every memory with `memory`
from prism.engine.inputs import InvalidValueError
from prism.engine.linear.recurrent import step
from prism.engine.memory import BACKENDS, FORMS, engine_of, memory, memory_, using
from prism.engine.update import Update

__all__ = ["BACKENDS", "FORMS", "InvalidValueError", "Update", "engine_of", "memory", "memory_", "step", "using"]
