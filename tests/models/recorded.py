"""A stand-in for CUDA graphs on a CPU, which repeats recorded operations on the same memory; and helpers of the tests.

Like a graph it does not read the model again, so that a test notices an outdated one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from prism.models import PrismCache, PrismForCausalLM
from prism.models.decode import Patience


class Recorder(TorchDispatchMode):
    """Records every operation with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = operation(*arguments, **(named or {}))
        self.calls.append((operation, arguments, named or {}, result))
        return result

    def replay(self) -> None:
        with torch.inference_mode():
            for operation, arguments, named, result in self.calls:
                bases = {_storage(z) for z in pytree.tree_leaves((arguments, named)) if isinstance(z, Tensor)}
                again = operation(*arguments, **named)
                for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and _storage(old) not in bases:  # a view is updated with its base
                        old.copy_(new)


def _storage(z: Tensor) -> int:
    return z.untyped_storage().data_ptr()


def capture(run: Callable[[], Any], *_: Any, **__: Any) -> tuple[Any, Recorder]:
    """Replacement of `cuda_graph.capture`. What it runs changes the step's states, which the first replay writes anew."""
    recorder = Recorder()
    with recorder:
        return run(), recorder


@torch.no_grad()
def steps(lm: PrismForCausalLM, cache: PrismCache, ids: Tensor) -> Tensor:
    """Logits after each token, one at a time."""
    return torch.cat([lm(ids[:, i : i + 1], past_key_values=cache).logits for i in range(ids.shape[1])], 1)


def step_of(cache: PrismCache) -> Any:
    """The captured step of a cache, or None."""
    return None if cache.graph is None else cache.graph.step


def never_captured(cache: PrismCache) -> PrismCache:
    """The cache, whose steps stay ordinary ones."""
    cache.graph = Patience(limit=-1)
    return cache


def pair(lm: PrismForCausalLM, ids: Tensor) -> tuple[PrismCache, PrismCache]:
    """Two caches that have read the same tokens, for ordinary steps and for captured ones."""
    caches = never_captured(PrismCache()), PrismCache()
    with torch.no_grad():
        for cache in caches:
            lm(ids, past_key_values=cache)
    return caches


def assert_same(plain: PrismCache, replayed: PrismCache) -> None:
    ours, theirs = replayed.tensors(), plain.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
