"""`DecodeStep`: one token through a language model with its states as plain tensors, for `torch.export` and ONNX.

    logits, *new = step(input_ids, *states)          input_ids [B]        logits [B, vocab_size]        states [B, …]

The states of a sequence that has not begun are zeros, for all rules that can be exported.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from prism.engine import using
from prism.models.language import PrismForCausalLM
from prism.nn.state import State

TOLERANCE = 1e-5
"""Largest difference of logits between empty states and zeros."""


class StateShape(NamedTuple):
    """A state tensor of the step, without its batch dimension."""

    name: str
    """The layer's number and the tensor's name in `State.tensors`: `"0.memory"`, `"0.carry.conv"`."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class DecodeStep(nn.Module):
    """One token of every row through a language model.

    A model whose state has no fixed size, or whose states do not start as zeros, is refused with a ValueError.

    Args:
        model: a language model; it is put into eval mode, and its weights are shared.

    Attributes:
        states: the states in the order in which `forward` takes and returns them.
    """

    def __init__(self, model: PrismForCausalLM) -> None:
        super().__init__()
        for i, layer in enumerate(model.model.layers):
            if not layer.mixer.rule.constant_state:
                raise ValueError(
                    f"layer {i} ({layer.mixer.rule.name}) cannot be exported as a step: its cache grows with the context; "
                    "export a model whose layers all have a state of fixed size"
                )
        self.model = model.eval()
        self.states: tuple[StateShape, ...] = ()
        device = model.lm_head.weight.device
        ids = torch.arange(2, device=device) % model.config.vocab_size
        with torch.no_grad():
            logits, new = self._step(ids, None)
            named = {f"{i}.{name}": part for i, state in enumerate(new) for name, part in state.tensors().items()}
            self.states = tuple(StateShape(name, tuple(part.shape[1:]), part.dtype) for name, part in named.items())
            difference = self(ids, *self.empty(2, device))[0] - logits
        if not bool(difference.abs().max() <= TOLERANCE * max(1.0, float(logits.abs().max()))):
            rules = ", ".join(dict.fromkeys(layer.mixer.rule.name for layer in model.model.layers))
            raise ValueError(
                f"the states of this model ({rules}) do not start as zeros, so its step cannot be exported"
            )

    def empty(self, batch: int, device: torch.device | str = "cpu") -> list[Tensor]:
        """The states of `batch` sequences before their first token."""
        return [torch.zeros(batch, *state.shape, dtype=state.dtype, device=device) for state in self.states]

    def forward(self, input_ids: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """input_ids `[B]`, states `[B, …]` in the order of `self.states` → logits `[B, vocab_size]`, new states."""
        layers: list[dict[str, Tensor]] = [{} for _ in self.model.model.layers]
        for (name, _, _), part in zip(self.states, states, strict=True):
            index, _, own = name.partition(".")
            layers[int(index)][own] = part
        logits, new = self._step(input_ids, [State.load(layer) for layer in layers])
        return logits, *(part for state in new for part in state.tensors().values())

    def _step(self, input_ids: Tensor, states: list[State] | None) -> tuple[Tensor, list[State]]:
        with using(form="recurrent", backend="torch"):
            layers = self.model.model.layers
            hidden, new = self.model.model.decode(input_ids, states or [State() for _ in layers], {})
        return self.model.lm_head(hidden), new
