"""PRISM: sequence models with a memory of fixed size, seen as one thing.

A *memory* is a matrix per head, a *rule* says from the input alone what is forgotten, erased and written, and the *engine*
computes any rule, exactly, in several *forms*. Importing this package imports torch and nothing heavier.
"""

from prism import rules
from prism.engine import Update, memory
from prism.nn import Mixer, State

__version__ = "0.1.0"
__all__ = ["Mixer", "State", "Update", "__version__", "memory", "rules"]
