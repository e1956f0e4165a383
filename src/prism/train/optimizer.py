"""Which parameter is updated how: AdamW, or Muon for hidden matrices with AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from prism.nn import no_weight_decay
from prism.train.muon import Muon
from prism.train.settings import OptimizerSettings


class Optimizers:
    """One or two optimisers used as one."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self.settings = settings
        hidden = _hidden_matrices(model) if settings.name == "muon" else set()
        exempt = no_weight_decay(model)
        groups: dict[str, list[nn.Parameter]] = {"muon": [], "decayed": [], "exempt": []}
        for name, parameter in model.named_parameters():
            groups["exempt" if name in exempt else "muon" if name in hidden else "decayed"].append(parameter)
        device = next(model.parameters()).device
        self.all: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [
                    {"params": groups["decayed"], "weight_decay": settings.weight_decay},
                    {"params": groups["exempt"], "weight_decay": 0.0},
                ],
                lr=settings.lr,
                betas=settings.betas,
                eps=settings.eps,
                fused=device.type in ("cpu", "cuda"),
            )
        ]
        if groups["muon"]:
            self.all.append(Muon(groups["muon"], settings.lr, settings.momentum, settings.weight_decay))

    def step(self, factor: float) -> None:
        """Update with `factor` times the learning rate."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.lr * factor
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)

    def parameters(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter]]:
        """Every parameter and the optimiser it belongs to."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer, parameter


def _hidden_matrices(model: nn.Module) -> set[str]:
    """Weights of linear maps between hidden layers: not the embedding, and not the head, tied to it or not."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
