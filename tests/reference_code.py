"""Other people's modules, made to run on the CPU with our weights."""

from __future__ import annotations

import inspect
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor


def transformers_module(model: str, monkeypatch: pytest.MonkeyPatch | None = None) -> Any:
    """A modelling file. Its functions call GPU packages where those are installed: with `monkeypatch`, torch only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = import_module(f"transformers.models.{model}.modeling_{model}")
    if monkeypatch is not None:
        for name, function in vars(module).copy().items():
            if inspect.isfunction(function) and hasattr(function, "__wrapped__"):
                monkeypatch.setattr(module, name, inspect.unwrap(function))
    return module


def load_all(module: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    """Every parameter exactly once; a module's name stands for its weight. The module is then only to be asked."""
    own = dict(module.named_parameters())
    named = {name if name in own else f"{name}.weight": z.detach() for name, z in tensors.items()}
    module.load_state_dict(named, strict=True)
    module.eval().requires_grad_(False)
