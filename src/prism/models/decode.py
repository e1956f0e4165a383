"""One more token per row: the path that `generate()`, sessions, prompts from a file and the server share.

`next_logits` computes what the model's forward pass would for one plain token per row, with any `PrismCache`. It answers
None where only the forward pass can: gradients, autocast, hooks on the whole model, tokens that `crop` left unread.

- On a CPU it computes with merged copies of the weights (engine/token.py), which live as long as a cache that has used them.
  Every plain token goes this way, so whether a text was interrupted, saved and resumed between two tokens does not change
  a bit of it. States are not written in place: an interrupted token changes nothing.
- On a GPU a step is hundreds of short kernels, and launching them from Python takes longer than running them. With states of
  fixed size one CUDA graph serves all steps. The first steps are not captured: a short generation never pays for a graph.
  A graph reads the weights where they are, and writes the cache's states in place.

`Decoder` is a batch of texts that join and leave between tokens.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prism import rules
from prism.engine import compat, cuda_graph, token, using
from prism.engine.memory import Choice, resolve
from prism.models.cache import PrismCache
from prism.models.rollback import Inputs
from prism.nn.block import Merged, scaled_norm
from prism.nn.snapshot import Snapshot
from prism.nn.state import State, concatenate

if TYPE_CHECKING:
    from prism.models.language import PrismForCausalLM

PATIENCE = 3
"""Ordinary steps with the same shapes before one is captured."""

Answer = tuple[Tensor, Tensor | None]
"""Logits `[B, V]`, and the balance loss of mixtures of memories."""


def next_logits(model: PrismForCausalLM, ids: Tensor, cache: PrismCache) -> Answer | None:
    """Logits after one more token per row, ids `[B, 1]`, which the cache then has read; None: `forward` must compute them."""
    choice = model.config.form, model.config.backend
    if choice == ("auto", "auto"):
        return _next(model, ids, cache)
    with using(*choice):
        return _next(model, ids, cache)


def _next(model: PrismForCausalLM, ids: Tensor, cache: PrismCache) -> Answer | None:
    if model.training or not cache.states or cache.unread or ids.ndim != 2 or ids.shape[1] != 1:
        return None
    if not token.allowed(ids) or not compat.is_unmodified(model.model):
        return None
    if len(cache.states) != len(model.model.layers) or cache.batch_size != len(ids):
        return None  # which says what is wrong
    if captures(ids):
        step = _captured(model, ids, cache)
        if step is not None:
            cache.keep_states()  # before they are overwritten
            answer = step(ids, cache.states)
            cache.advance(list(step.states), [Inputs(ids)], 1)
            return answer
    logits, balance, new = _compute(model, ids, cache.states, _merged(model, ids, cache))
    cache.advance(new, [Inputs(ids)], 1)
    return logits, balance


def _compute(
    model: PrismForCausalLM, ids: Tensor, states: list[State], weights: ModelWeights | None
) -> tuple[Tensor, Tensor | None, list[State]]:
    """Logits `[B, V]`, balance loss and new states."""
    shared: dict[str, Tensor] = {}
    layers, norm, head = (None, None, None) if weights is None else (weights.layers, weights.norm, weights.head)
    x, new = model.model.decode(ids[:, 0], states, shared, layers, norm)
    return model.lm_head(x) if head is None else torch.mm(x, head), shared.get("balance_loss"), new


# On a CPU


@dataclass(eq=False)
class ModelWeights:
    """Merged weights of a model, and what the model was like."""

    layers: list[Merged]
    norm: token.ScaledNorm | None
    head: Tensor | None
    snapshot: Snapshot


_merged_weights: weakref.WeakKeyDictionary[Any, weakref.ref[ModelWeights]] = weakref.WeakKeyDictionary()


def _merged(model: PrismForCausalLM, ids: Tensor, cache: PrismCache) -> ModelWeights | None:
    """The merged weights of a model on a CPU. They are kept alive by the caches that use them."""
    if ids.device.type != "cpu":
        return None
    found = cache.weights
    if not isinstance(found, ModelWeights) or found.snapshot.modules[0] is not model:
        kept = _merged_weights.get(model)
        found = None if kept is None else kept()
    if found is None or not found.snapshot.holds():
        snapshot = Snapshot(model, in_place=True)
        with torch.inference_mode(False), torch.no_grad():  # they may be used in any mode
            layers = [layer.merged() for layer in model.model.layers]
            found = ModelWeights(layers, scaled_norm(model.model.norm), _merged_head(model), snapshot)
        if snapshot.complete:
            _merged_weights[model] = weakref.ref(found)
    cache.weights = found
    return found


def _merged_head(model: PrismForCausalLM) -> Tensor | None:
    """The weight of an unmodified head, stored so that one row is multiplied fastest; None: it is called as a module."""
    head = model.lm_head
    if type(head) is not nn.Linear or head.bias is not None or not compat.is_unmodified(head):
        return None
    plain = type(head.weight) is nn.Parameter and head.weight.device.type == "cpu" and not head.weight.is_inference()
    return token.joined([head.weight]) if plain else None


# On a GPU


def captures(ids: Tensor) -> bool:
    """Whether steps for these tokens are captured: on a GPU, unless the caller captures a graph of its own."""
    return ids.is_cuda and not torch.cuda.is_current_stream_capturing()


class Captured:
    """A step of one token per row for a fixed batch size, with fixed buffers for the tokens and the states.

    `states` belong to the step, which writes them in place.
    """

    def __init__(self, model: PrismForCausalLM, ids: Tensor, states: list[State], state_dtype: torch.dtype) -> None:
        self.model, self.state_dtype, self.choice = model, state_dtype, resolve()
        self.snapshot = Snapshot(model, in_place=False)
        with torch.inference_mode(False), torch.no_grad():  # later steps may write to them in any mode
            self.ids = ids.clone()
            self.states = [state.map(_contiguous) for state in states]
        new = self._step()[-1]  # also triggers everything compiled on first use, and overwrites `states`
        self.fixed = layout(new) == layout(self.states)
        """Whether a step returns states of the same shapes and dtypes."""
        if self.fixed:
            self.answer, self.graph = cuda_graph.capture(self._run, ids.device)

    def _step(self) -> tuple[Tensor, Tensor | None, list[State]]:
        logits, balance, new = _compute(
            self.model, self.ids, [replace(state, overwrite=True) for state in self.states], None
        )
        cache = PrismCache(self.state_dtype)
        cache.update(new, 0)
        return logits, balance, cache.states

    def _run(self) -> Answer:
        """What is captured. A graph is never interrupted: most memories are updated in place, the rest is copied."""
        logits, balance, new = self._step()
        _copy(new, self.states)
        return logits, balance

    def serves(self, model: PrismForCausalLM, ids: Tensor, states: list[State]) -> bool:
        """Whether replaying gives what `model` would compute now for these tokens and states."""
        about = (ids.shape, ids.dtype, ids.device) == (self.ids.shape, self.ids.dtype, self.ids.device)
        if model is not self.model or not about or resolve() != self.choice:
            return False
        return (self.holds(states) or layout(states) == layout(self.states)) and self.snapshot.holds()

    def holds(self, states: list[State]) -> bool:
        """Whether these are the step's own states, as the last step left them."""
        return len(states) == len(self.states) and all(map(is_, states, self.states))

    def __call__(self, ids: Tensor, states: list[State]) -> Answer:
        """Run the step. The new states are in `self.states`."""
        self.ids.copy_(ids)
        if not self.holds(states):  # since then there was another step, or beams were reordered
            _copy(states, self.states)
        self.graph.replay()
        logits, balance = self.answer
        return logits.clone(), None if balance is None else balance.clone()


@dataclass
class Patience:
    """How long a cache waits before a step is captured, and the step; one attempt per kind of step."""

    step: Captured | None = None
    kind: Any = None
    waited: int = 0
    limit: int = PATIENCE


def _captured(model: PrismForCausalLM, ids: Tensor, cache: PrismCache) -> Captured | None:
    """A captured step for a cache, after `PATIENCE` ordinary steps of the same kind; None before."""
    about = cache.graph = Patience(limit=PATIENCE) if cache.graph is None else cache.graph
    if about.step is not None and not about.step.serves(model, ids, cache.states):
        about.step, about.kind = None, None  # also frees its memory
        about.limit *= 2  # if this happens repeatedly, captures become rare
    if about.step is not None:
        return about.step
    if not can_be_captured(model):
        about.kind = None
        return None
    kind: tuple[int, torch.Size, torch.dtype, torch.device, Choice, Any]
    kind = id(model), ids.shape, ids.dtype, ids.device, resolve(), layout(cache.states)
    about.waited = about.waited + 1 if kind == about.kind else 0
    about.kind = kind
    if about.waited != about.limit:
        return None
    try:
        step = Captured(model, ids, cache.states, cache.state_dtype)
    except RuntimeError as error:  # a failed capture raises two errors, of which the first is the cause
        why = error.__context__ or error
        warnings.warn(f"a step of this model cannot be replayed, and will be slower: {why}", stacklevel=4)
        return None
    except BaseException:  # an interrupt: the next steps may try again
        about.kind = None
        raise
    about.step = step if step.fixed else None
    return about.step


def can_be_captured(model: PrismForCausalLM) -> bool:
    """Whether all steps of the model run the same kernels, as far as can be known without running one.

    That is: all of it on one device, no growing states, no hooks, and no adapters of peft, which are switched by flags that a
    graph does not see.
    """
    if not model.config.constant_state:
        return False
    if {type(p.data) for p in model.parameters()} != {Tensor} or len({p.device for p in model.parameters()}) != 1:
        return False
    modules = list(model.modules())
    hooks = compat.forward_hooks(modules)
    if hooks is None or any(hooks) or compat.registries(modules) is None:  # changes could not be detected
        return False
    return not any(hasattr(m, "_disable_adapters") for m in modules)


def layout(states: list[State]) -> list[dict[str, Any]]:
    """Shape, dtype and device of every tensor."""
    return [{name: (z.shape, z.dtype, z.device) for name, z in state.tensors().items()} for state in states]


def _copy(sources: list[State], targets: list[State]) -> None:
    """Copy states in place, with one kernel for all tensors of a dtype: a few are large, many are small."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for source, target in zip(sources, targets, strict=True):
        given = source.tensors()
        for name, buffer in target.tensors().items():
            if given[name] is not buffer:
                buffers, values = by_dtype.setdefault(buffer.dtype, ([], []))
                buffers.append(buffer)
                values.append(given[name])
    for buffers, values in by_dtype.values():
        compat.copy_all(buffers, values)


def _contiguous(z: Tensor) -> Tensor:
    return z.clone(memory_format=torch.contiguous_format)


# Many texts


class Decoder:
    """Rows of one batch, a text in each, which join and leave between tokens.

    Args:
        sizes: numbers of rows to choose from, ascending: the batch has the smallest that suffices, unused rows computing
            anything, and returns to a smaller one when its half suffices. None: as many rows as there are texts. The last
            bits of a row depend on the number of rows, and a CUDA graph serves one number only.
        state_dtype: as of a `PrismCache`.
    """

    def __init__(
        self, model: PrismForCausalLM, sizes: Sequence[int] | None = None, state_dtype: torch.dtype = torch.float32
    ) -> None:
        if sizes is not None and not model.config.constant_state:
            raise ValueError("sizes must be None for a model whose states grow with the text, got numbers of rows")
        self.model, self.sizes, self.state_dtype = model, sizes, state_dtype
        self._growing = [not rules.get(layer.rule).constant_state for layer in model.config.layer_plan]
        self._cache = PrismCache(state_dtype)
        self._slots: list[Any] = []
        self._joining: list[PrismCache] = []

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def texts(self) -> list[Any]:
        """What stands in the rows in use, in the order of `step`'s tokens and logits."""
        return [text for text in self._slots if text is not None]

    @torch.inference_mode()
    def join(self, text: Any, cache: PrismCache) -> None:
        """Add a row with the state of a cache of one row. The cache itself is not changed."""
        if self.sizes is None:
            self._slots.append(text)
            self._joining.append(cache.copy())
            return
        if None not in self._slots:
            self._resize(len(self._slots) + 1, cache)
        slot = self._slots.index(None)
        self._slots[slot] = text
        for held, new in zip(self._cache.states, cache.states, strict=True):
            given = new.tensors()
            for name, rows in held.tensors().items():
                rows[slot].copy_(given[name][0])

    def _resize(self, rows: int, like: PrismCache) -> None:
        """Make room for this many rows: those in use come first, the others hold any state."""
        assert self.sizes is not None
        size = next(size for size in self.sizes if size >= rows)
        used = [slot for slot, text in enumerate(self._slots) if text is not None]
        index = torch.tensor([*used, *[used[0] if used else 0] * (size - len(used))])
        old = self._cache.states if used else like.states
        self._cache.states, self._cache.tokens = [], 0
        self._cache.update([state.index_select(index) for state in old], 0)
        self._slots = [self._slots[slot] for slot in used] + [None] * (size - len(used))

    @torch.inference_mode()
    def leave(self, texts: Sequence[Any]) -> None:
        """Remove the rows of these texts."""
        gone = set(map(id, texts))
        if self.sizes is not None:
            self._slots = [None if id(text) in gone else text for text in self._slots]
            smaller = [size for size in self.sizes if len(self) <= size // 2]
            if len(self) and smaller and smaller[0] < len(self._slots):
                self._resize(smaller[0], self._cache)
            return
        held = len(self._slots) - len(self._joining)
        keep = [i for i, text in enumerate(self._slots) if id(text) not in gone]
        self._joining = [self._joining[i - held] for i in keep if i >= held]
        self._slots = [self._slots[i] for i in keep]
        kept = [i for i in keep if i < held]
        if len(kept) < held:
            index = torch.tensor(kept, dtype=torch.long)
            states = [state.index_select(index) for state in self._cache.states] if kept else []
            pairs = zip(states, self._growing, strict=bool(states))
            self._cache.states = [_trimmed(state) if grows else state for state, grows in pairs]

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one token per text; returns the logits `[texts, V]` of the next, float32 on the CPU."""
        if self._joining:
            groups = [cache.states for cache in (self._cache, *self._joining) if cache.states]
            self._cache.states = []
            self._cache.update([concatenate(list(layer)) for layer in zip(*groups, strict=True)], 0)
            self._joining = []
        used = [slot for slot, text in enumerate(self._slots) if text is not None]
        ids = torch.zeros(len(self._slots), 1, dtype=torch.long)
        ids[used, 0] = torch.tensor(tokens)
        out: Any = self.model(ids.to(self.model.device), past_key_values=self._cache, use_cache=True, return_dict=True)
        logits = out.logits[:, -1].float().cpu()
        return logits if len(used) == len(self._slots) else logits[used]


def sizes_for(model: PrismForCausalLM, rows: int) -> tuple[int] | None:
    """Sizes of a `Decoder` for up to so many texts: one on a GPU, where a step costs about the same for any number of rows and
    a graph much memory; on a CPU, and for growing states, as many rows as texts."""
    return (rows,) if model.device.type == "cuda" and model.config.constant_state else None


def _trimmed(state: State) -> State:
    """A cache of attention that is as long as its longest row: slots at the front that no row uses are cut off."""
    memory = state.memory
    unused = memory["k"].shape[1] - int(memory["length"].max())
    return replace(state, memory={**memory, "k": memory["k"][:, unused:], "v": memory["v"][:, unused:]})
