"""Replay the forward and backward pass of a micro-batch as a CUDA graph: the host then starts one thing instead of thousands.

The first micro-batch of each shape runs as usual, the second is captured, and from then on its graph is replayed on samples
that are copied into the captured ones. Gradients are added to tensors that stay in place, so the loop's gradient accumulation,
clipping and update are the same. It pays where the host is slower than the device (small models, rules that process mini-batch
after mini-batch); a large step gains nothing. Captured memory is kept as long as the run lasts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from prism.engine.compat import zero_all
from prism.engine.cuda_graph import capture
from prism.train.task import Samples

Differentiate = Callable[[Any, Any], Tensor]
"""(samples, weight) → the loss of the samples divided by the weight, after its gradients were added to the parameters."""
SHAPES = 16
"""Shapes of samples for which graphs are kept; others run as usual."""


def check_graph(model: nn.Module, device: torch.device, processes: int) -> None:
    """Raise ValueError if a step cannot be a graph."""
    if device.type != "cuda":
        raise ValueError(f"graph needs a GPU, but the device is {device}: omit --graph")
    if processes > 1:
        raise ValueError(f"graph works in one process, not in {processes}: omit --graph")
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
        raise ValueError(
            "graph would repeat the random numbers of dropout differently: set dropout to 0 or omit --graph"
        )


class GraphedPasses:
    """Forward and backward passes that are captured once per shape of samples."""

    def __init__(self, model: nn.Module, differentiate: Differentiate) -> None:
        self.model, self.differentiate = model, differentiate
        self.graphs: dict[Any, _Graph | None] = {}
        """By shape; None: it has run once."""
        self.pool: Any = None

    def __call__(self, samples: Samples, weight: float) -> Tensor:
        """As `differentiate`. The result is overwritten by the next call."""
        tensors = samples.tensors()
        key = tuple((name, tuple(z.shape), z.dtype) for name, z in tensors.items())
        graph = self.graphs.get(key)
        if graph is None:
            if key not in self.graphs:
                if len(self.graphs) < SHAPES:
                    self.graphs[key] = None
                return self.differentiate(samples, weight)
            graph = self.graphs[key] = _Graph(self.differentiate, samples, tensors, weight, self.pool)
            self.pool = graph.pool
        return graph.replay(tensors, weight)

    def zero_gradients(self) -> None:
        """Set gradients to zero in place. Parameters that never had one keep None."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if grads:
            zero_all(grads)


class _Graph:
    """A captured pass with the tensors that it reads and writes."""

    def __init__(
        self, differentiate: Differentiate, samples: Samples, tensors: dict[str, Tensor], weight: float, pool: Any
    ) -> None:
        self.tensors = tensors
        device = next(iter(tensors.values())).device
        self.weight = torch.full((), float(weight), device=device)
        self.loss, self.graph = capture(lambda: differentiate(samples, self.weight), device, pool, errors="global")
        self.pool = self.graph.pool()

    def replay(self, tensors: dict[str, Tensor], weight: float) -> Tensor:
        self.weight.fill_(float(weight))
        for name, held in self.tensors.items():
            if held is not tensors[name]:
                held.copy_(tensors[name], non_blocking=True)
        self.graph.replay()
        return self.loss
