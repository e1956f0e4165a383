"""Modules: one mixer for all rules, and the state it hands on."""

from prism.nn.mixer import Mixer
from prism.nn.state import State

__all__ = ["Mixer", "State"]
