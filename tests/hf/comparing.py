"""What tests of single layers share: near results, counted calls, inputs for `gradcheck`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def called(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[None]:
    """Grows with every call of a function."""
    calls: list[None] = []
    original = getattr(module, name)

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(None)
        return original(*given, **named)

    monkeypatch.setattr(module, name, counted)
    return calls


def assert_near(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).detach().norm()) < 1e-4 * float(b.detach().norm()) + 1e-6
