"""Modules: one mixer for all rules, its state, blocks, and layer patterns.

What enters here is a torch module that works with every rule. Start with mixer.py: `Mixer.forward` for sequences,
`Mixer.decode` for a token.
"""

from prism.nn.block import Block
from prism.nn.mixer import Mixer
from prism.nn.parameters import no_weight_decay
from prism.nn.pattern import LayerSpec, parse_layers
from prism.nn.state import State

__all__ = ["Block", "LayerSpec", "Mixer", "State", "no_weight_decay", "parse_layers"]
