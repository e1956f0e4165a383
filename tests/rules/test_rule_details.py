"""Facts about single rules that can be checked by hand: decays, ranges, sizes, special cases, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import prism
from prism import Mixer, rules
from prism.rules.parts import LowRank, fused_linears
from prism.rules.rule import Span
from tests.helpers import assert_close
from tests.rules.rule_cases import CASES, HEADS, WIDTH, first_update, perturbed_mixer, perturbed_rule, tokens

LAYERED = ("lightning", "hgrn2", "rwkv6", "rwkv7")


def test_rules_are_listed_from_prism_on() -> None:
    family = (
        "prism gated_delta delta efla delta_product comba kda gdn2 rwkv7 "
        "linear retnet lightning gated_retention mamba2 mamba3 gla hgrn2 rwkv6"
    )
    assert rules.names()[:18] == tuple(family.split())


@pytest.mark.parametrize("name", rules.names())
def test_an_unknown_option_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="no option 'flavour'"):
        Mixer(name, WIDTH, HEADS, flavour="sweet")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("delta_product", {"householders": 0}, "householders must be an integer ≥ 1"),
        ("delta_product", {"gate_by": "sigmoid"}, "gate_by is that of the output gate: set gate=True, or omit it"),
        ("delta_product", {"gate": True, "gate_by": "tanh"}, "gate_by must be one of silu, sigmoid, got 'tanh'"),
        ("mamba2", {"groups": 3}, "groups must be an integer that divides heads = 4"),
        ("mamba3", {"groups": 3}, "groups must be an integer that divides heads = 4"),
        ("mamba3", {"rotary_fraction": 1.5}, "rotary_fraction must be a number from 0 to 1"),
        ("mamba3", {"key_dim": 3}, "rotary_fraction = 0.5 of key_dim = 3 channels is not a pair"),
        ("comba", {"correction": -1.0}, "correction must be a number ≥ 0"),
        ("kda", {"lower_bound": 5.0}, "lower_bound is a log-decay"),
        ("gla", {"gate_rank": 0}, "rank of a low-rank map"),
        ("retnet", {"key_dim": 3}, "key_dim must be even"),
        *((name, {"layer_index": 2, "layer_count": 2}, "layer_index must be one of 0") for name in LAYERED),
        *((name, {"layer_count": 0}, "layer_count must be an integer ≥ 1") for name in LAYERED),
    ],
)
def test_bad_options_are_refused_in_one_sentence(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixer(name, WIDTH, HEADS, **options)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_half_precision_goes_through(name: str, options: dict[str, Any]) -> None:
    """Gates stay in float32, activations do not: on the meta device, which checks every dtype and computes nothing."""
    mixer = Mixer(name, WIDTH, HEADS, **options).bfloat16().to("meta")
    x = torch.empty(2, 3, WIDTH, dtype=torch.bfloat16, device="meta")
    y, state = mixer(x)
    assert y.dtype == torch.bfloat16
    assert all(z.dtype != torch.float64 for z in state.tensors().values())


def test_retnet_decays() -> None:
    rule = perturbed_rule("retnet", torch.float64)
    x = tokens(1, 3)
    expected = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(HEADS)], dtype=torch.float64)
    assert_close("decay", first_update(rule, x).log_decay.exp(), expected.expand(1, 3, -1), 1e-14)
    assert first_update(rule.bfloat16(), x.bfloat16()).log_decay.dtype == torch.float32


@pytest.mark.parametrize(("layer", "scale"), [(0, 1 + 1e-5), (3, 0.5 + 1e-5), (6, 1e-5)])
def test_lightning_slopes(layer: int, scale: float) -> None:
    rule = perturbed_rule("lightning", torch.float64, layer_index=layer, layer_count=7)
    slopes = torch.tensor([2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0], dtype=torch.float64)
    assert_close("log-decay", first_update(rule, tokens(1, 2)).log_decay, (-scale * slopes).expand(1, 2, -1), 1e-12)


def test_gated_retention_and_gla_take_the_sixteenth_root() -> None:
    x = tokens(1, 5)
    gated: Any = perturbed_rule("gated_retention", torch.float64)
    assert_close("head", first_update(gated, x).log_decay.exp() ** 16, gated.decay_in(x).sigmoid(), 1e-10)
    gla: Any = perturbed_rule("gla", torch.float64)
    assert_close("channel", first_update(gla, x).log_decay.flatten(-2).exp() ** 16, gla.decay_in(x).sigmoid(), 1e-10)


@pytest.mark.parametrize(
    ("name", "options", "low", "high"),
    [
        ("gated_delta", {}, 1e-4, 16),
        ("mamba2", {}, 1, 16),
        ("kda", {}, 1, 16),
        ("kda", {"lower_bound": -5.0}, 1, 1),
        ("gdn2", {}, 1, 16),
        ("comba", {}, 1e-4, 16),
    ],
)
def test_softplus_gates_start_in_their_ranges(name: str, options: dict[str, Any], low: float, high: float) -> None:
    decay: Any = rules.get(name).build(64, 16, **options).decay
    rate, step = decay.A_log.exp(), F.softplus(decay.dt_bias)
    assert low * (1 - 1e-5) <= rate.min() and rate.max() <= high * (1 + 1e-5)
    assert step.min() >= 1e-3 * (1 - 1e-4) and step.max() <= 1e-1 * (1 + 1e-4)
    assert step.max() > 3 * step.min()  # spread, not one number


def test_published_sizes() -> None:
    sizes = {name: Mixer(name, 256, 4).rule for name in rules.names()[1:18]}
    keys = {name: (rule.key_dim, rule.value_dim) for name, rule in sizes.items()}
    assert keys["gated_delta"] == keys["comba"] == (48, 96)
    assert keys["retnet"] == (64, 128)
    assert keys["mamba2"] == keys["mamba3"] == (128, 128)
    assert keys["gla"] == (32, 64)
    others = set(keys) - {"gated_delta", "comba", "retnet", "mamba2", "mamba3", "gla"}
    assert {keys[name] for name in others} == {(64, 64)}
    assert sizes["delta_product"].write_rank == sizes["mamba3"].write_rank == 2
    assert all(rule.state_size == 4 * math.prod(keys[name]) for name, rule in sizes.items())


@pytest.mark.parametrize(
    ("simple", "options"),
    [
        ("delta", {"negative_eigenvalues": True}),
        ("gated_delta", {"gate": True, "negative_eigenvalues": True}),
        ("gated_delta", {"gate_by": "sigmoid", "negative_eigenvalues": True}),
    ],
)
def test_one_householder_is_the_delta_rule(simple: str, options: dict[str, Any]) -> None:
    sizes = {"key_dim": 6, "value_dim": 5}
    mixer = perturbed_mixer(simple, torch.float64, **options, **sizes)
    gate_by = {name: value for name, value in options.items() if name == "gate_by"}
    gated = {"forget_gate": True, "gate": True, **gate_by} if simple == "gated_delta" else {}
    product = Mixer("delta_product", WIDTH, HEADS, householders=1, **gated, **sizes).double()
    product.load_state_dict(mixer.state_dict(), strict=True)
    x = tokens(2, 20)
    torch.testing.assert_close(product(x)[0], mixer(x)[0], rtol=0, atol=0)


def test_two_reflections_rotate() -> None:
    """β = 2 reflects exactly; two reflections of the plane turn by twice the angle between their keys."""
    turn = 0.3
    k = torch.tensor([[1.0, 0.0], [math.cos(turn), math.sin(turn)]], dtype=torch.float64).view(1, 2, 1, 1, 2)
    state = torch.eye(2, dtype=torch.float64).view(1, 1, 2, 2)
    update = prism.Update(
        torch.zeros(1, 1, 1, 2, dtype=torch.float64),
        k,
        torch.zeros_like(k),
        erase_key=k.squeeze(3),
        erase_strength=torch.full((1, 2, 1), 2.0, dtype=torch.float64),
        substeps=2,
    )
    c, s = math.cos(2 * turn), math.sin(2 * turn)
    rotation = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    assert_close("rotation", prism.memory(update, state)[1][0, 0], rotation, 1e-12)


def test_mamba2_with_a_constant_gate_is_retention_without_rotation() -> None:
    mamba: Any = perturbed_rule("mamba2", torch.float64)
    retnet: Any = perturbed_rule("retnet", torch.float64)
    x = tokens(2, 30)
    with torch.no_grad():
        mamba.decay_in.weight.zero_()
        rate = -retnet.log_decay(x)[0, 0]
        mamba.decay.A_log.copy_((rate / F.softplus(mamba.decay.dt_bias)).log())
    update = first_update(mamba, x)
    mixed, _ = mamba.conv(mamba.qkv(x), None, Span())
    c, b, value = mixed.split(mamba.sizes, -1)
    step = F.softplus(mamba.decay.dt_bias)
    retention = prism.Update(
        c.unsqueeze(2),
        b.unsqueeze(2).unsqueeze(3),
        (value.unflatten(-1, (HEADS, -1)) * step.unsqueeze(-1)).unsqueeze(3),
        retnet.log_decay(x),
    )
    assert_close("outputs", prism.memory(update)[0], prism.memory(retention)[0], 1e-12)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_hgrn2_writes_what_it_forgets(layer: int) -> None:
    rule: Any = perturbed_rule("hgrn2", torch.float64, layer_index=layer, layer_count=4)
    update = first_update(rule, tokens(2, 9))
    assert_close("1 - f", update.k.squeeze(3), 1 - update.log_decay.exp(), 1e-12)
    share = rule.bound.softmax(0)
    bound = (share.cumsum(0) - share[0])[layer].view(HEADS, -1)
    assert_close("γ", rule.log_bound()[0].exp(), bound, 1e-12)
    assert bool((update.log_decay.exp() >= bound - 1e-12).all())
    fresh = rules.get("hgrn2").build(WIDTH, HEADS, layer_index=layer, layer_count=4)
    assert_close("γ at the start", fresh.log_bound()[0].exp(), torch.full((HEADS, WIDTH // HEADS), layer / 4), 1e-6)


@pytest.mark.parametrize("layer", [0, 2])
def test_hgrn2_survives_saturated_gates(layer: int) -> None:
    rule: Any = perturbed_rule("hgrn2", layer_index=layer, layer_count=3)
    x = 1e4 * torch.randn(1, 20, WIDTH)
    update = first_update(rule, x)  # Update itself refuses decays that are infinite or positive
    update.log_decay.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in rule.parameters() if p.grad is not None)


def test_kda_lower_bound_holds() -> None:
    rule: Any = perturbed_rule("kda", lower_bound=-5.0)
    g = rule.beta_and_decay(100 * torch.randn(1, 50, WIDTH))[1]
    assert g.min() >= -5 and g.max() <= 0 and g.min() < -4.9


def test_maps_side_by_side_answer_as_each_alone_and_a_changed_one_is_called() -> None:
    maps = [torch.nn.Linear(6, size, bias=False) for size in (3, 5, 1)]
    x = torch.randn(2, 4, 6, requires_grad=True)
    for got, m in zip(fused_linears(x, *maps), maps, strict=True):
        torch.testing.assert_close(got, m(x))
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), x, retain_graph=True), torch.autograd.grad(m(x).sum(), x)
        )
    maps[1].register_forward_hook(lambda module, given, answer: answer + 1)
    torch.testing.assert_close(fused_linears(x, *maps)[1], x @ maps[1].weight.T + 1)

    class Adapted(torch.nn.Linear):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(given)

    adapted = Adapted(6, 3, bias=False)
    torch.testing.assert_close(fused_linears(x, maps[0], adapted)[1], 2 * x @ adapted.weight.T)


class Quantised(torch.Tensor):
    """A weight that knows one operation, as the quantised ones of libraries do."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function is torch.cat:
            raise NotImplementedError("this weight cannot be joined to others")
        if function is not torch.nn.functional.linear:
            return super().__torch_function__(function, types, arguments, keywords or {})
        x, weight, *bias = arguments
        return 2 * function(x, weight.as_subclass(torch.Tensor), *bias)


def give_own_forward(m: torch.nn.Linear) -> None:
    weight, m.weight = m.weight, torch.nn.Parameter(torch.empty_like(m.weight, device="meta"))
    m.forward = lambda x: 2 * torch.nn.functional.linear(x, weight)


def quantise(m: torch.nn.Linear) -> None:
    m.weight = torch.nn.Parameter(m.weight.detach().as_subclass(Quantised), requires_grad=False)


@pytest.mark.parametrize("change", [give_own_forward, quantise])
def test_maps_whose_weights_are_elsewhere_or_quantised_are_called(change: Any) -> None:
    maps = [torch.nn.Linear(6, size, bias=False) for size in (3, 5)]
    x = torch.randn(2, 4, 6)
    expected = [2 * m(x) for m in maps]
    for m in maps:
        change(m)
    torch.testing.assert_close(fused_linears(x, *maps), expected)


@pytest.mark.parametrize("rule", ["prism", "kda"])
def test_hooks_of_every_map_are_called(rule: str) -> None:
    mixer, seen = Mixer(rule, WIDTH, HEADS).double(), set()
    maps = {m for m in mixer.modules() if isinstance(m, (torch.nn.Linear, LowRank))}
    for m in maps:
        m.register_full_backward_hook(lambda module, d_input, d_output: seen.add(module))
    mixer(tokens(1, 5).requires_grad_())[0].sum().backward()
    assert seen == maps


def test_hooks_of_a_low_rank_map_are_called() -> None:
    mixer: Any = Mixer("prism", WIDTH, HEADS).double()
    x = tokens(1, 5)
    before = mixer(x)[0]
    mixer.rule.writes.gain.register_forward_hook(lambda module, given, answer: answer + 1)
    assert not torch.allclose(mixer(x)[0], before)
