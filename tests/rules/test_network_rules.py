"""The rules whose memories are networks: what they reduce to, how their layers run, what they claim and refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import prism
from prism import Mixer
from prism.engine.networks import Averaged, InnerUpdate, Momentum
from prism.rules.rule import Span
from tests.helpers import assert_close, relative_error
from tests.rules.rule_cases import small_mixer


def linear_state(update: InnerUpdate) -> Tensor:
    """The first weights of a linear network as the memory `[B, H, K, V]` of an `Update`."""
    return update.network.weights[0].detach().expand(update.batch, -1, -1, -1)


def inner_update(mixer: Mixer, tokens: int = 13) -> InnerUpdate:
    x = torch.randn(2, tokens, mixer.rule.width, generator=torch.Generator().manual_seed(2)).double()
    return mixer.rule.update(x, {}, Span())[0]


@torch.no_grad()
def test_online_ttt_linear_without_norm_residual_and_bias_is_deltanet() -> None:
    u = inner_update(small_mixer("ttt_linear", mini_batch=1, inner_norm=False, residual=False, bias=False))
    assert isinstance(u.learner, Averaged)
    beta = u.rate * u.learner.scale
    written = (beta.unsqueeze(-1) * u.v).unsqueeze(3)
    delta = prism.Update(u.q, u.k.unsqueeze(3), written, erase_key=u.k, erase_strength=beta)
    expected, end = prism.memory(delta, linear_state(u))
    for form in ("recurrent", "chunkwise", "serial"):
        o, state = prism.memory(u, form=form)
        assert_close(form, o, expected, 1e-10)
        assert_close(form, state["w1"], end, 1e-10)


@torch.no_grad()
def test_online_linear_titans_without_momentum_is_a_gated_delta_that_erases_the_undecayed_memory() -> None:
    u = inner_update(small_mixer("titans", depth=1, mini_batch=1, momentum=False))
    assert isinstance(u.learner, Momentum)
    written = (2 * u.rate.unsqueeze(-1) * u.v).unsqueeze(3)
    closed = prism.Update(
        u.q,
        u.k.unsqueeze(3),
        written,
        u.learner.log_decay,
        erase_key=u.k,
        erase_strength=2 * u.rate,
        erase_on="undecayed",
    )
    expected, end = prism.memory(closed, linear_state(u))
    o, state = prism.memory(u)
    assert_close("o", o, expected, 1e-10)
    assert_close("memory", state["w1"], end, 1e-10)


@torch.no_grad()
@pytest.mark.parametrize("mini_batch", [1, 2, 4])
def test_untrained_titans_stay_finite(mini_batch: int) -> None:
    """With full steps of single tokens and momentum several of these seeds overflow."""
    for seed in range(8):
        torch.manual_seed(seed)
        mixer, x = Mixer("titans", 64, 2, mini_batch=mini_batch), torch.randn(2, 120, 64)
        y, state = mixer(x)
        assert bool(y.isfinite().all()) and all(float(z.abs().max()) < 10 for z in state.tensors().values())


def test_base_lr_is_one_over_the_mini_batch_but_for_single_tokens_with_momentum() -> None:
    rates = {
        (b, momentum): Mixer("titans", 16, 2, mini_batch=b, momentum=momentum).rule.base_lr
        for b in (1, 2, 3, 4, 16)
        for momentum in (False, True)
    }
    assert rates.pop((1, True)) == 0.5
    assert all(rate == 1 / b for (b, _), rate in rates.items())


@pytest.mark.parametrize("depth", [1, 2])
@torch.no_grad()
def test_atlas_of_one_token_without_newton_schulz_and_features_is_titans(depth: int) -> None:
    plain = {"depth": depth, "mini_batch": 4, "key_dim": 8, "expand": 2}
    titans, atlas = (
        small_mixer("titans", **plain),
        Mixer("atlas", 16, 2, window=1, degree=1, newton_schulz=0, **plain).double(),
    )
    atlas.load_state_dict(titans.state_dict(), strict=False)
    ours, theirs = inner_update(atlas), inner_update(titans)
    assert isinstance(ours.learner, Momentum)
    same = replace(ours, rate=theirs.rate, learner=replace(ours.learner, step=torch.ones_like(ours.rate)))
    states = prism.memory(same)[1], prism.memory(theirs)[1]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert_close(name, value, states[1][name], 1e-10)
    assert_close("o", prism.memory(same)[0], prism.memory(theirs)[0], 1e-12)
    assert relative_error(prism.memory(ours)[0], prism.memory(theirs)[0]) > 1e-3, "its own gates differ"


@torch.no_grad()
def test_rotary_positions_count_within_a_mini_batch() -> None:
    mixer = small_mixer("ttt_linear", mini_batch=4)
    x = torch.randn(1, 1, 16, dtype=torch.float64).expand(1, 12, 16)
    k = mixer.rule.update(x, {}, Span())[0].k
    assert_close("one mini-batch later", k[:, 4:8], k[:, :4], 1e-12)
    assert relative_error(k[:, 1:2], k[:, :1]) > 1e-2


MIXERS = [
    ("ttt_linear", {"mini_batch": 1}),
    ("ttt_linear", {"shared_qk": True, "gate": True, "mini_batch": 3}),
    ("ttt_mlp", {"mini_batch": 1}),
    ("ttt_mlp", {"inner_norm": False, "residual": False, "base_lr": 0.5, "mini_batch": 5}),
    ("titans", {"depth": 1, "momentum": False, "mini_batch": 3}),
    ("titans", {"depth": 3, "expand": 1, "value_dim": 5, "mini_batch": 1}),
    ("atlas", {"window": 3, "degree": 1, "newton_schulz": 0, "mini_batch": 4}),
    ("atlas", {"window": 5, "degree": 3, "key_dim": 3, "newton_schulz": 2, "mini_batch": 2, "momentum": False}),
]
every_mixer = pytest.mark.parametrize(("name", "options"), MIXERS)


@every_mixer
@torch.no_grad()
def test_mixers_step_pad_and_pack_as_they_run(name: str, options: dict[str, Any]) -> None:
    """Left, right and inner padding with rows at different places of their mini-batches; packed documents; single steps."""
    mixer = small_mixer(name, **options)
    documents = [torch.randn(1, n, 16, generator=torch.Generator().manual_seed(n)).double() for n in (7, 1, 4)]
    alone = [mixer(d)[0] for d in documents]

    reset = torch.zeros(1, 12, dtype=torch.bool)
    reset[0, [7, 8]] = True
    for form in mixer.forms:
        assert_close(form, mixer(torch.cat(documents, 1), reset=reset, form=form)[0], torch.cat(alone, 1), 1e-10)

    state, stepped = None, []
    for t in range(7):
        y, state = mixer.decode(documents[0][:, t], state)
        stepped.append(y)
    assert_close("steps", torch.stack(stepped, 1), alone[0], 1e-10)

    x = torch.full((3, 9, 16), torch.nan, dtype=torch.float64)
    mask = torch.zeros(3, 9, dtype=torch.bool)
    for row, places in enumerate(([0, 2, 3, 4, 6, 7, 8], [8], [0, 1, 2, 3])):
        mask[row, places] = True
        x[row, places] = documents[row][0]
    first, state = mixer(x[:, :4], mask=mask[:, :4])
    second, _ = mixer(x[:, 4:], state, mask=mask[:, 4:])
    for row, (y, expected) in enumerate(zip(torch.cat([first, second], 1), alone, strict=True)):
        assert_close(f"row {row}", y[mask[row]], expected[0], 1e-10)
        assert torch.count_nonzero(y[~mask[row]]) == 0


def test_sizes_are_those_of_the_table() -> None:
    d = 8
    sizes = {
        "ttt_linear": d * d + d,
        "ttt_mlp": 8 * d * d + 5 * d,
        "titans": 2 * (2 * d * d + 2 * d * d),
        "atlas": 2 * (44 * d + d * d) + 7 * (44 + d + 1),
    }
    for name, size in sizes.items():
        assert Mixer(name, 16, 2).state_size == 2 * size
    ranks = [Mixer(name, 16, 2).write_rank for name in sizes]
    assert ranks == [1, 16, 16, 8]


def test_serial_is_claimed_for_one_token_a_mini_batch_only() -> None:
    x = torch.randn(1, 5, 16)
    assert Mixer("ttt_mlp", 16, 2, mini_batch=1).forms[-1] == "serial"
    with pytest.raises(ValueError, match=r"mini_batch must be 1, not 16.*serial"):
        Mixer("ttt_mlp", 16, 2)(x, form="serial")
    with pytest.raises(ValueError, match=r"without momentum.*serial"):
        Mixer("titans", 16, 2, mini_batch=1)(x, form="serial")
