"""A training step of a language model, called directly or replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from prism.models import PrismConfig, PrismForCausalLM
from prism.nn import no_weight_decay
from prism.nn.block import SwiGLU
from prism.rules.parts.norms import HeadNorm


def slice_loss(head: nn.Module, hidden: Tensor, labels: Tensor, size: int = 16384) -> Tensor:
    """Cross-entropy over all tokens, with the logits of `size` tokens in memory at a time."""

    def one(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(h).float(), y, reduction="sum")

    slices = zip(hidden.flatten(0, 1).split(size), labels.flatten().split(size), strict=True)
    parts = [checkpoint(one, h, y, use_reentrant=False, preserve_rng_state=False) for h, y in slices]
    return torch.stack(parts).sum() / labels.numel()


class Trainer:
    """A model, its optimiser and its steps.

    Args:
        form: of every mixer; None leaves the choice to the engine.
        compiled: "pieces" (gated norms and SwiGLUs), "layers" or "no".
        recompute: recompute activations in the backward (gradient checkpointing).
    """

    def __init__(self, config: PrismConfig, device: str, form: str | None, compiled: str, recompute: bool) -> None:
        torch.manual_seed(0)
        self.device = device
        if form is not None:
            config.form = form
        self.model = PrismForCausalLM(config).to(device).train()
        if recompute:
            self.model.gradient_checkpointing_enable()
        parts = {"pieces": (HeadNorm, SwiGLU), "layers": (type(self.model.model.layers[0]),), "no": ()}[compiled]
        for module in self.model.modules():
            if isinstance(module, parts):
                module.compile(dynamic=True)
        still = no_weight_decay(self.model)
        groups = [
            {"params": [p for n, p in self.model.named_parameters() if (n in still) == quiet], "weight_decay": decay}
            for quiet, decay in ((False, 0.1), (True, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=device == "cuda")
        self.replay: Callable[[], Tensor] | None = None

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def differentiate(self, batch: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            hidden = self.model.model(batch[:, :-1], use_cache=False).last_hidden_state
            loss = slice_loss(self.model.lm_head, hidden, batch[:, 1:])
        loss.backward()
        return loss.detach()

    def step(self, batch: Tensor) -> float:
        loss = self.differentiate(batch) if self.replay is None else self.replay()
        self.optimizer.step()
        if self.replay is None:
            self.optimizer.zero_grad(set_to_none=True)
        return loss.item()  # waits for the device

    def capture(self, batch: Tensor) -> None:
        """Capture a step. Later steps replay it on the current contents of `batch`; gradients are overwritten, not added to."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what torch sets up at the first use of a stream must not be captured
            self.differentiate(batch)
            self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.differentiate(batch)

        def replay() -> Tensor:
            graph.replay()
            return loss

        self.replay = replay
