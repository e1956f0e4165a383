"""`PrismCache`, the cache for generation: one state per layer, and the number of tokens they have seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache

from prism.engine.token import STATE_DTYPES
from prism.models.compat import tokens_removed
from prism.models.rollback import DEPTH, Inputs, Rollback, count, cut, join
from prism.nn.state import State


class PrismCache(Cache):
    """The states of a stack, in the shape that transformers' `generate` expects of a cache.

    A call makes new states, and leaves the old ones as they are. The exception is a GPU, where after a few tokens a CUDA graph
    takes over (models/decode.py) and writes states in place: take a `copy`, or `tensors`, to return to a position later.

    Its size is that of the layers' states, which does not depend on the number of tokens for rules with `constant_state`.

    Args:
        state_dtype: dtype in which memories are kept between calls, float32 or bfloat16. They are computed in float32 in any
            case. bfloat16 halves their size, and rounds them after every call. It applies to memories that are one tensor, as
            those of all linear rules; keys and values of softmax attention, and networks, are kept as they are.
        rollback: number of last tokens that `crop` can remove; 0 keeps nothing for it. See `activate_past_recording`.
    """

    state_dtype: torch.dtype = torch.float32  # also of caches that were pickled before there was a choice

    def __init__(self, state_dtype: torch.dtype = torch.float32, *, rollback: int = 0) -> None:
        super().__init__(layers=[])
        if state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype must be torch.float32 or torch.bfloat16, got {state_dtype!r}")
        self.states: list[State] = []
        self.tokens = 0
        self.state_dtype = state_dtype
        self.unread: list[Inputs] = []
        """Inputs that `tokens` counts but the states have not read: the next forward pass starts with them."""
        self.rollback: Rollback | None = None
        self.weights: Any = None
        """The merged weights that its last token was computed with, which it keeps alive (models/decode.py)."""
        self.graph: Any = None
        """The captured step that owns the states, on a GPU (models/decode.py)."""
        if rollback:
            self.activate_past_recording(rollback)

    def update(self, states: list[State], tokens: int) -> None:  # type: ignore[override]  # whole states, not a layer's keys
        """Replace the states by those after `tokens` more positions (padding included, as transformers counts)."""
        self.states = [_with_memory_in(self.state_dtype, state) for state in states]
        self.tokens += tokens

    def read(
        self,
        inputs: Inputs,
        removable: int,
        run: Callable[..., tuple[Tensor, list[State], list[Tensor]]],
        shared: dict[str, Tensor],
        embed: Callable[[Tensor], Tensor],
        update: bool,
    ) -> tuple[Any, list[Any]]:
        """Run a stack on what a `crop` left unread, then on these inputs: its output and hidden states on the latter.

        Args:
            removable: number of last tokens that may be removed after this call.
            run: `run(tokens, states, mask, reset, shared)` → output, new states, hidden states.
            shared: a dict for all layers.
            embed: embeddings of token ids.
            update: whether to update and record the states.
        """
        pieces = self._pieces(inputs, removable) if update else [[*self.unread, inputs]]
        runs, states = [], self.states
        for piece in pieces:
            part = join(piece, embed)
            own = shared if piece is pieces[-1] else {}  # layers share values of the same tokens
            runs.append(run(part.tokens, states, part.mask, part.reset, own))
            states = runs[-1][1]
        if update:  # after all is computed: an interrupted call leaves the cache as it was
            for piece, (_, new, _) in zip(pieces, runs, strict=True):
                self.advance(new, piece, removable)
        x = torch.cat([x for x, _, _ in runs], 1)[:, -len(inputs) :]
        return x, [torch.cat(parts, 1)[:, -len(inputs) :] for parts in zip(*(h for _, _, h in runs), strict=True)]

    def _pieces(self, inputs: Inputs, removable: int) -> list[list[Inputs]]:
        """All inputs to run, in two pieces if the states between should be kept.

        Otherwise a `crop` of few tokens would have to read a long prompt again.
        """
        parts = [*self.unread, inputs]
        if self.rollback is None:
            return [parts]
        total = count(parts)
        before = total - max(removable, self.rollback.depth)
        return [parts] if before < 2 * self.rollback.depth else [cut(parts, 0, before), cut(parts, before, total)]

    def advance(self, states: list[State], inputs: list[Inputs], removable: int) -> None:
        """Replace the states by those after these inputs, and record both."""
        self.keep_states()
        behind, new = count(self.unread), count(inputs)
        self.unread = cut(self.unread, new, behind)
        self.update(states, max(new - behind, 0))
        if self.rollback is not None:
            self.rollback.add(inputs, self._read, self.states, removable)

    @property
    def rolls_back(self) -> bool:
        """Whether the cache records, or has tokens to read again."""
        return self.rollback is not None or bool(self.unread)

    def keep_states(self) -> None:
        """Keep the states for `crop`, if it is time."""
        if self.rollback is not None and self.rollback.due(self._read):
            self.rollback.keep(self._read, self.kept_states())

    @property
    def _read(self) -> int:
        """Number of tokens that the states have read."""
        return self.tokens - count(self.unread)

    def kept_states(self) -> list[State]:
        """States that later calls do not change."""
        step = None if self.graph is None else self.graph.step
        if step is None or not step.holds(self.states):
            return list(self.states)
        return [state.map(torch.clone) for state in self.states]

    def activate_past_recording(self, tokens: int = DEPTH) -> None:
        """Record from now on what `crop` needs to remove the last `tokens` tokens. transformers calls this, too.

        It takes up to two more copies of states of fixed size; they are copied once every `tokens` tokens.
        """
        if not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"the number of tokens that crop can remove must be an integer ≥ 1, got {tokens!r}")
        if self.rollback is None:
            self.rollback = Rollback(tokens)
        self.rollback.depth = max(self.rollback.depth, tokens)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by flat name, for saving; `load` is the inverse."""
        named = {f"{i}.{name}": x for i, state in enumerate(self.kept_states()) for name, x in state.tensors().items()}
        unread = {f"unread.{i}.{name}": x for i, part in enumerate(self.unread) for name, x in part.tensors().items()}
        return {**named, **unread, "tokens": torch.tensor(self.tokens)}

    @classmethod
    def load(cls, tensors: dict[str, Tensor]) -> Self:
        """The cache with these tensors; the inverse of `tensors`. It does not record."""
        layers, unread = dict[int, dict[str, Tensor]](), dict[int, dict[str, Tensor]]()
        for key, x in tensors.items():
            if key != "tokens":
                parts = unread if key.startswith("unread.") else layers
                index, name = key.removeprefix("unread.").split(".", 1)
                parts.setdefault(int(index), {})[name] = x
        kept = {layer["memory"].dtype for layer in layers.values() if "memory" in layer}
        cache = cls(torch.bfloat16 if torch.bfloat16 in kept else torch.float32)
        cache.update([State.load(layers[i]) for i in sorted(layers)], int(tensors["tokens"]))
        cache.unread = [Inputs(**unread[i]) for i in sorted(unread)]
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
        self.states, self.tokens, self.unread = [], 0, []
        self.rollback = None if self.rollback is None else Rollback(self.rollback.depth)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of rows to everything."""
        self.states = [state.map(function) for state in self.states]
        self.unread = [part.map(function) for part in self.unread]
        self.rollback = None if self.rollback is None else self.rollback.map(function)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: -n removes n, a positive number is the length that remains, 0 removes none.

        The memories return to an earlier state. The tokens since then that remain are read again by the next forward pass.
        Possible are all tokens of which the last call computed logits, and those before it that are still recorded.
        """
        remove = tokens_removed(tokens_to_remove, self.tokens)
        if remove == 0:
            return
        points = [] if self.rollback is None else self.rollback.points
        start = points[0].tokens if points else self._read
        if self.tokens > remove > self.tokens - start or remove > self.tokens:
            raise ValueError(
                f"of this cache's {self.tokens} tokens the last {self.tokens - start} can be removed, or all, not {remove}: "
                f"call activate_past_recording({max(remove, DEPTH)}) before reading them, or keep a copy() from before them"
            )
        if remove == self.tokens:
            self.reset()
            return
        remaining = self.tokens - remove
        if self.rollback is not None and remaining < self._read:
            self.states, self.unread = self.rollback.back_to(remaining, self.unread)
        else:
            self.unread = cut(self.unread, 0, remaining - self._read)
        self.tokens = remaining

    def copy(self) -> PrismCache:
        """An independent cache with the same states. Tensors are copied only if a captured step writes them in place."""
        twin = PrismCache(self.state_dtype)
        twin.update(self.kept_states(), self.tokens)
        twin.unread = list(self.unread)
        twin.rollback = None if self.rollback is None else self.rollback.copy()
        return twin

    def __copy__(self) -> PrismCache:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> PrismCache:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "weights": None, "graph": None}

    @property
    def batch_size(self) -> int:
        parts: Iterator[State | Inputs] = chain(self.states, self.unread)
        return next((x.shape[0] for part in parts for x in part.tensors().values()), -1)

    @property
    def is_initialized(self) -> bool:
        return bool(self.states or self.unread)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True  # after activate_past_recording, which transformers calls first

    @property
    def is_sliding(self) -> Any:
        return [False] * len(self.states)


def _with_memory_in(dtype: torch.dtype, state: State) -> State:
    """The state with its memory in this dtype; the state itself if that changes nothing (float64 stays float64)."""
    memory = state.memory
    if not isinstance(memory, Tensor) or memory.dtype == dtype or memory.dtype not in STATE_DTYPES:
        return state
    return replace(state, memory=memory.to(dtype))
