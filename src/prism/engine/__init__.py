"""Compute memories, exactly, in several forms. Knows no rule.

Read update.py (the normal form), linear/recurrent.py (its definition) and linear/chunkwise.py (the fast form) first.
"""

from prism.engine import registry  # noqa: F401 - registers every memory with `memory`
from prism.engine.defaults import BACKENDS, FORMS, using
from prism.engine.dispatch import engine_of, memory, memory_
from prism.engine.inputs import InvalidValueError
from prism.engine.linear.recurrent import step
from prism.engine.update import Update

__all__ = ["BACKENDS", "FORMS", "InvalidValueError", "Update", "engine_of", "memory", "memory_", "step", "using"]
