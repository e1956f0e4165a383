"""The states of branches in a cache of transformers, in numbered slots of the base layer's own cache layer.

A cache layer may hold several conv and recurrent states. Those after the base's are the branches': so whatever the cache does
with its states (reorder beams, repeat or select rows, move them, reset) it also does with the branches'. Removing the last
tokens (`crop`) is refused by transformers for every memory of this kind.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_NAMES = "prism_slots"
TENSORS = ("conv_states", "recurrent_states", "conv_kernel_size")
FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state")


def keep_only(layer: Any, names: list[str]) -> None:
    """Drop the states of all other adapters: they would miss the tokens that come now."""
    slots = layer.__dict__.get(_NAMES, {})
    if all(name in names for name in slots):
        return
    kept = {
        name: [getattr(layer, field)[i] for field in (*TENSORS, *FLAGS)] for name, i in slots.items() if name in names
    }
    for _ in slots:
        layer.number_of_states -= 1
        for field in (*TENSORS, *FLAGS):
            del getattr(layer, field)[layer.number_of_states]
    slots.clear()
    for name, values in kept.items():
        i = _slot(layer, name)
        for field, value in zip((*TENSORS, *FLAGS), values, strict=True):
            getattr(layer, field)[i] = value


def read(layer: Any, name: str) -> tuple[Tensor | None, Tensor | None]:
    """The memory `[B, H, K, V]` and the anchor's window `[B, W - 1, width]` of an adapter; None before the first token."""
    i = layer.__dict__.get(_NAMES, {}).get(name)
    if i is None or not layer.has_previous_state[i]:
        return None, None
    window = layer.conv_states[i]
    return layer.recurrent_states[i], None if window is None else window.transpose(1, 2)


def write(layer: Any, name: str, memory: Tensor, window: Tensor) -> None:
    """Store both, in place where they are stored already, as the cache does with the base's."""
    i = _slot(layer, name)
    if not layer.is_recurrent_states_initialized[i]:
        layer.lazy_initialization(recurrent_states=memory, state_idx=i)
    layer.recurrent_states[i].copy_(memory)
    if window.shape[1]:
        window = window.transpose(1, 2)
        if not layer.is_conv_states_initialized[i]:
            layer.lazy_initialization(conv_states=window, state_idx=i)
        layer.conv_states[i].copy_(window)
    layer.has_previous_state[i] = True


def _slot(layer: Any, name: str) -> int:
    """The number of an adapter's slot, a new one if it has none."""
    slots = layer.__dict__.setdefault(_NAMES, {})
    if name not in slots:
        slots[name] = layer.number_of_states
        layer.number_of_states += 1
        for field in TENSORS:
            getattr(layer, field)[slots[name]] = None
        for field in FLAGS:
            getattr(layer, field)[slots[name]] = False
    return slots[name]
