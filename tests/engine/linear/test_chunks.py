"""Chunks that are computed in turn, because of an erase, agree with the definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from prism.engine import Update
from prism.engine.linear import chunks
from prism.engine.linear.chunkwise import chunkwise
from prism.engine.linear.recurrent import recurrent


@pytest.mark.parametrize("erase", ["first", "separate", "undecayed"])
@pytest.mark.parametrize(("tokens", "writes", "packed"), [(1, 1, False), (70, 1, True), (131, 2, True), (64, 2, False)])
def test_chunks_in_turn_agree_with_the_definition(erase: str, tokens: int, writes: int, packed: bool) -> None:
    torch.manual_seed(0)
    B, H, K, V = 2, 3, 5, 4
    unit = F.normalize(torch.randn(B, tokens, H, writes, K, dtype=torch.float64), dim=-1)
    reset = torch.rand(B, tokens) < 0.1 if packed else None
    kind: dict[str, object] = {"erase_first": True} if erase == "first" else {"erase_key": unit[..., 0, :].flip(-1)}
    update = Update(
        torch.randn(B, tokens, H, K, dtype=torch.float64),
        unit,
        torch.randn(B, tokens, H, writes, V, dtype=torch.float64),
        -torch.rand(B, tokens, H, dtype=torch.float64),
        erase_strength=torch.rand(B, tokens, H, dtype=torch.float64),
        erase_on="undecayed" if erase == "undecayed" else "decayed",
        reset=reset,
        mask=torch.rand(B, tokens) < 0.9,
        **kind,
    )
    state = torch.randn(B, H, K, V, dtype=torch.float64)
    for found, wanted in zip(chunkwise(update, state, chunk=16), recurrent(update, state), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("strength", "alike", "double"), [(1.0, True, False), (2.0, False, False), (2.0, True, True), (-0.5, True, True)]
)
def test_inverses_are_made_in_float64_where_they_amplify_rounding(
    strength: float, alike: bool, double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = chunks.unit_lower_inverse
    monkeypatch.setattr(chunks, "unit_lower_inverse", lambda lower: seen.append(lower.dtype) or original(lower))
    unit = F.normalize(torch.randn(1, 20, 2, 1, 60), dim=-1)
    if alike:
        unit = unit[:, :1].expand_as(unit)
    beta = torch.full((1, 20, 2), strength)
    update = Update(unit[..., 0, :], unit, unit, erase_strength=beta, erase_first=True)
    chunkwise(update)
    assert (torch.float64 in seen) == double
