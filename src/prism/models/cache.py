"""`PrismCache`, the cache for generation: one state per layer, and the number of tokens they have seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache

from prism.engine.layer_step import STATE_DTYPES
from prism.nn.state import State

if TYPE_CHECKING:
    from typing_extensions import Self


class CachedModel(Protocol):
    """The interface of a model that a cache can step, such as `PrismForCausalLM`."""

    config: Any

    def forward(self, input_ids: Tensor, **options: Any) -> Any: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def buffers(self) -> Iterator[Tensor]: ...


class PrismCache(Cache):
    """The states of a stack, in the shape that transformers' `generate` expects of a cache.

    Its size is that of the layers' states, which does not depend on the number of tokens for rules with `constant_state`.

    Args:
        state_dtype: dtype in which memories are kept between calls, float32 or bfloat16. They are computed in float32 in any
            case. bfloat16 halves their size, and rounds them after every call. It applies to memories that are one tensor, as
            those of all linear rules; keys and values of softmax attention, and networks, are kept as they are.
    """

    state_dtype: torch.dtype = torch.float32  # also of caches that were pickled before there was a choice

    def __init__(self, state_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(layers=[])
        if state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype must be torch.float32 or torch.bfloat16, got {state_dtype!r}")
        self.states: list[State] = []
        self.tokens = 0
        self.state_dtype = state_dtype

    def update(self, states: list[State], tokens: int) -> None:  # type: ignore[override]  # whole states, not a layer's keys
        """Replace the states by those after `tokens` more positions (padding included, as transformers counts)."""
        self.states = [_with_memory_in(self.state_dtype, state) for state in states]
        self.tokens += tokens

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by flat name, for saving; `load` is the inverse."""
        named = {f"{i}.{name}": x for i, state in enumerate(self.states) for name, x in state.tensors().items()}
        return {**named, "tokens": torch.tensor(self.tokens)}

    @classmethod
    def load(cls, tensors: dict[str, Tensor]) -> Self:
        """The cache with these tensors; the inverse of `tensors`."""
        layers: dict[int, dict[str, Tensor]] = {}
        for key, x in tensors.items():
            if key != "tokens":
                layer, name = key.split(".", 1)
                layers.setdefault(int(layer), {})[name] = x
        kept = {layer["memory"].dtype for layer in layers.values() if "memory" in layer}
        cache = cls(torch.bfloat16 if torch.bfloat16 in kept else torch.float32)
        cache.update([State.load(layers[i]) for i in sorted(layers)], int(tensors["tokens"]))
        return cache

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layers={len(self.states)}, tokens={self.tokens}, nbytes={self.nbytes})"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # no maximum

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def reset(self) -> None:
        self.states, self.tokens = [], 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.states = [state.index_select(beam_idx) for state in self.states]

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.states = [state.map(lambda x: x.repeat_interleave(repeats, 0)) for state in self.states]

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a memory of fixed size cannot remove its last tokens: keep a copy() of the cache from before them instead"
        )

    def copy(self) -> PrismCache:
        """An independent cache with the same states. States are never written in place, so no tensor is copied."""
        twin = PrismCache(self.state_dtype)
        twin.update(list(self.states), self.tokens)
        return twin

    @property
    def batch_size(self) -> int:
        sizes = [len(x) for state in self.states for x in state.tensors().values()]
        return sizes[0] if sizes else -1

    @property
    def is_initialized(self) -> bool:
        return bool(self.states)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> Any:
        return [False] * len(self.states)


def _with_memory_in(dtype: torch.dtype, state: State) -> State:
    """The state with its memory in this dtype; the state itself if that changes nothing (float64 stays float64)."""
    memory = state.memory
    if not isinstance(memory, Tensor) or memory.dtype == dtype or memory.dtype not in STATE_DTYPES:
        return state
    return replace(state, memory=memory.to(dtype))
