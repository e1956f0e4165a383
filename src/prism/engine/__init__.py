"""How a memory is computed. Knows no rule. Read update.py, recurrent.py and chunkwise.py first."""

from prism.engine.dispatch import BACKENDS, FORMS, engine_of, memory
from prism.engine.recurrent import step
from prism.engine.update import InvalidValueError, Update

__all__ = ["BACKENDS", "FORMS", "InvalidValueError", "Update", "engine_of", "memory", "step"]
