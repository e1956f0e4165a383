"""`torch.compile(fullgraph=True)` sees through a mixer: no hidden device sync, no graph break."""

import pytest
import torch

import prism


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["prism", "gated_delta", "efla", "linear", "mamba3", "gla", "rwkv7"])
def test_a_mixer_compiles_whole(rule: str) -> None:
    torch.manual_seed(0)
    mixer = prism.Mixer(rule, 32, 2)
    x = torch.randn(2, 70, 32, requires_grad=True)
    y, state = mixer(x)
    (expected,) = torch.autograd.grad(y.square().sum(), x)
    compiled = torch.compile(mixer, fullgraph=True)
    z, compiled_state = compiled(x)
    (got,) = torch.autograd.grad(z.square().sum(), x)
    torch.testing.assert_close(z, y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled_state.memory, state.memory, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
