"""Softmax attention with normed queries and keys, rotary positions on some channels, and a gate: written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prism import Mixer
from tests.helpers import assert_close
from tests.rules.rule_cases import perturbed_mixer

D, H, K, T = 12, 3, 8, 7


@pytest.mark.parametrize(("qk_norm", "gate", "rope_dims"), [(True, True, 4), (True, False, None), (False, True, 2)])
def test_the_options_by_hand(qk_norm: bool, gate: bool, rope_dims: int | None) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"key_dim": K, "kv_heads": 1, "rope_base": 50.0, "norm_eps": 0.1}
    more = {"qk_norm": qk_norm, "gate": gate, "rope_dims": rope_dims}
    mixer = perturbed_mixer("softmax", torch.float64, D, H, **options, **more)
    p, x = dict(mixer.rule.named_parameters()), torch.randn(2, T, D, dtype=torch.float64)
    q, k, v = (x @ p["qkv.weight"].T).split([H * K, K, K], -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (1, K)), v.unflatten(-1, (1, K))
    if qk_norm:
        q, k = (
            z * (z.square().mean(-1, keepdim=True) + 0.1).rsqrt() * p[f"{name}_norm.weight"]
            for name, z in (("query", q), ("key", k))
        )
    turned = K if rope_dims is None else rope_dims
    angle = torch.arange(T)[:, None, None] * 50.0 ** -(torch.arange(turned // 2).double() / (turned // 2))

    def rotate(z: Tensor) -> Tensor:
        a, b, rest = z.split([turned // 2, turned // 2, K - turned], -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), rest], -1)

    scores = torch.einsum("bihk,bjhk->bhij", rotate(q), rotate(k).expand(-1, -1, H, -1)) * K**-0.5
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    o = torch.einsum("bhij,bjhk->bihk", scores.softmax(-1), v.expand(-1, -1, H, -1)).flatten(-2)
    if gate:
        o = o * F.sigmoid(x @ p["gate.weight"].T)
    assert_close("output", mixer(x)[0], o @ p["out.weight"].T, 1e-12)


@pytest.mark.parametrize("value", [0, -2, 9, 2.0])
def test_channels_that_are_not_there_cannot_be_rotated(value: Any) -> None:
    with pytest.raises(ValueError, match="rope_dims must be from 2 to the head's 8 channels, got"):
        Mixer("softmax", D, H, key_dim=K, rope_dims=value)
