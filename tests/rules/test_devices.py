"""No rule creates a tensor on the wrong device: the meta device computes nothing, but refuses to mix devices and dtypes."""

from __future__ import annotations

import pytest
import torch

from prism import Mixer, rules

WIDTH, HEADS = 16, 2
TOKENS = {"recurrent": 3, "serial": 3, "scan": 300}
"""More than a chunk, where a form has chunks; 70 unless named."""
LOOKS = {"s4d": "parallel", **dict.fromkeys(("ttt_linear", "ttt_mlp", "titans", "atlas"), "chunkwise")}
"""Forms that read where documents start, which the meta device cannot provide."""


@pytest.mark.parametrize("name", rules.names())
def test_every_form_stays_where_its_input_is(name: str) -> None:
    """From a state, padded and packed, over several chunks, in training, in half precision."""
    dtype = torch.bfloat16
    mixer = Mixer(name, WIDTH, HEADS).to(dtype).to("meta")
    for form in mixer.forms:
        count = TOKENS.get(form, 70)
        x = torch.empty(2, count, WIDTH, dtype=dtype, device="meta")
        real = torch.ones(2, count, dtype=torch.bool, device="meta")
        packed = {} if LOOKS.get(name) == form else {"mask": real, "reset": real}
        state = None
        for _ in range(2):
            y, state = mixer(x, state, form=form, **packed)
            assert (y.device.type, y.dtype, y.shape) == ("meta", dtype, x.shape)
        y.sum().backward()
        assert all(value.device.type == "meta" for value in state.tensors().values())
