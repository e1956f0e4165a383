"""Compute memories, exactly, in several forms. Knows no rule.

What enters here computes what an update says, on any device, with a definition in torch to test it against. Start with
update.py (the normal form), linear/recurrent.py (its definition) and linear/chunkwise.py with chunks.py (the fast form); then
memory.py (the call) and implementations.py (what it chooses from).
"""

from prism.engine import implementations  # noqa: F401 - registers every memory with `memory`
from prism.engine.inputs import InvalidValueError
from prism.engine.linear.recurrent import step
from prism.engine.memory import BACKENDS, FORMS, engine_of, memory, memory_, using
from prism.engine.update import Update

__all__ = ["BACKENDS", "FORMS", "InvalidValueError", "Update", "engine_of", "memory", "memory_", "step", "using"]
