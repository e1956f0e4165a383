"""How a memory is computed. Knows no rule. Read update.py, recurrent.py and chunkwise.py first."""

from prism.engine import kinds  # noqa: F401 - registers the memories beyond the linear one
from prism.engine.defaults import BACKENDS, FORMS, using
from prism.engine.dispatch import engine_of, memory
from prism.engine.in_place import memory_
from prism.engine.recurrent import step
from prism.engine.update import InvalidValueError, Update

__all__ = ["BACKENDS", "FORMS", "InvalidValueError", "Update", "engine_of", "memory", "memory_", "step", "using"]
