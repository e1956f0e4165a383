"""How a memory is computed. Knows no rule. Read update.py, recurrent.py and chunkwise.py first."""

from prism.engine import registry as kinds  # noqa: F401 - registers the memories beyond the linear one
from prism.engine.defaults import BACKENDS, FORMS, using
from prism.engine.dispatch import engine_of, memory, memory_
from prism.engine.linear.recurrent import step
from prism.engine.update import InvalidValueError, Update

__all__ = ["BACKENDS", "FORMS", "InvalidValueError", "Update", "engine_of", "memory", "memory_", "step", "using"]
