"""Options of PRISM's writes 2 … L, its erase and its gates: against plain loops, and the same in every way to compute them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prism import Mixer, rules
from prism.engine import FORMS
from prism.models import PrismConfig, PrismForCausalLM
from prism.nn.block import Block
from prism.rules.parts.writes import ResidualWrites
from tests.helpers import assert_close, relative_error
from tests.rules.test_prism import convolve, corrections, perturbed, rms, unit

D, H, K, V, T = 8, 2, 4, 5, 9


def loops(p: dict[str, Tensor], x: Tensor, options: dict[str, Any]) -> Tensor:
    """The outputs `[T, D]` of the `lm` layer with any of its options, token by token."""
    n, keys, erase = options["steps"] - 1, options["keys"], options["erase"]
    qs, ks, vs = convolve(x @ p["qkv.weight"].T, p["conv.weight"]).split([H * K, H * K, H * V], -1)
    u = convolve(x, p["writes.conv.weight"])

    def mapped(name: str, given: Tensor) -> Tensor:
        if f"{name}.weight" in p:
            return given @ p[f"{name}.weight"].T
        return given @ p[f"{name}.down.weight"].T @ p[f"{name}.up.weight"].T

    heads = []
    for h in range(H):
        values, rows = slice(h * V, (h + 1) * V), slice(h * K, (h + 1) * K)
        q, k1, v = unit(qs[:, rows]) / K**0.5, unit(ks[:, rows]), vs[:, values]
        beta1 = (x @ p["beta.weight"][h]).sigmoid()
        gates = (mapped("decay_in", x) + p["decay.dt_bias"]).view(T, H, -1)[:, h]  # [T, K], or [T, 1] per head
        alpha = torch.exp(-p["decay.A_log"][h].exp() * F.softplus(gates))
        strength = beta1.unsqueeze(1).expand(-1, K)
        if erase != "tied":
            strength = mapped("erase", x).view(T, H, -1)[:, h].sigmoid().expand(-1, K)
        gains = mapped("writes.gain", u).view(T, H, n, V)[:, h]
        deltas = corrections(v - mapped("writes.expected", u)[:, values], [gains[:, l] for l in range(n)], "closed")
        beta = mapped("writes.beta", u).view(T, H, n)[:, h].sigmoid()
        gamma = p["writes.scale"][:, h] if "writes.scale" in p else x.new_full((n, V), options["step_scale"])
        S, outputs = x.new_zeros(V, K), []
        for t in range(T):
            S = alpha[t] * S
            S = S - torch.outer(S @ (strength[t] * k1[t]), k1[t]) + beta1[t] * torch.outer(v[t], k1[t])
            for l in range(n):
                if keys == "previous":
                    key = k1[t - 1 - l] if t > l else torch.zeros(K, dtype=x.dtype)
                elif keys == "rotated":
                    turned = torch.view_as_complex(k1[t].view(2, K // 2).T.contiguous())
                    turned = turned * torch.polar(torch.ones_like(p["writes.angle"][l, h]), p["writes.angle"][l, h])
                    key = torch.cat([turned.real, turned.imag])
                elif keys == "convolved":
                    key = unit(convolve(mapped("writes.key", x), p["writes.key_conv.weight"]).view(T, H, n, K)[t, h, l])
                else:
                    key = unit(mapped("writes.key", u).view(T, H, n, K)[t, h, l])
                if keys == "orthogonal":
                    key = unit(key - (key @ k1[t]) * k1[t])
                S = S + torch.outer(gamma[l] * beta[t, l] * deltas[l][t], key)
            outputs.append(S @ q[t])
        gate = x @ p["gate.weight"][values].T
        gate = F.silu(gate) if options.get("gate_by") == "silu" else gate.sigmoid()
        heads.append(rms(torch.stack(outputs), p["norm.norm.weight"]) * gate)
    return torch.cat(heads, -1) @ p["out.weight"].T


@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize(
    ("keys", "rest"),
    [
        ("own", {"key_rank": 0}),
        ("orthogonal", {"scaling": "head"}),
        ("convolved", {"erase": "head"}),
        ("convolved", {"key_rank": 0}),
        ("rotated", {"scaling": "fixed", "step_scale": 0.5}),
        ("previous", {"erase": "channel"}),
        ("own", {"forget": "channel", "gate_by": "silu"}),
        ("orthogonal", {"forget": "channel", "erase": "channel"}),
    ],
)
def test_every_choice_is_its_equations(steps: int, keys: str, rest: dict[str, Any]) -> None:
    options = {"steps": steps, "keys": keys, "erase": "tied", **rest}
    mixer = perturbed(Mixer("prism", D, H, key_dim=K, value_dim=V, **options))
    p = {name.removeprefix("rule."): value for name, value in mixer.state_dict().items()}
    x = torch.randn(T, D, dtype=torch.float64)
    assert_close("y", mixer(x.unsqueeze(0))[0][0], loops(p, x, options), 1e-11)


@pytest.mark.parametrize("rank", [None, 3])
def test_paper_with_gate_and_convolutions_is_its_equations(rank: int | None) -> None:
    V = D // H
    options = {"preset": "paper", "steps": 2, "key_dim": K, "gate": True, "qkv_conv": True, "rank": rank}
    mixer = perturbed(Mixer("prism", D, H, **options))
    p = {name.removeprefix("rule."): value for name, value in mixer.state_dict().items()}
    x = torch.randn(T, D, dtype=torch.float64)
    u = convolve(x, p["conv.weight"])
    joint = torch.cat([x @ p[f"{name}.weight"].T for name in ("query", "key", "value")], -1)
    qs, ks, vs = convolve(joint, p["qkv_conv.weight"]).split([H * K, 2 * H * K, D], -1)
    heads = []
    for h in range(H):
        values = slice(h * V, (h + 1) * V)
        q, keys = unit(qs[:, h * K : (h + 1) * K]) / K**0.5, unit(ks.view(T, H, 2, K)[:, h])
        beta = (u @ p["beta.weight"].view(H, 2, D)[h].T).sigmoid()
        alpha = (u @ p["alpha.weight"][h] + p["alpha.bias"][h]).sigmoid()
        gain = p["gain.weight"] if rank is None else p["gain.up.weight"] @ p["gain.down.weight"]
        gains = [u @ m.T for m in gain.view(H, 2, V, D)[h]]
        deltas = corrections(vs[:, values] - u[:, values], gains, "gelu")
        S, outputs = x.new_zeros(V, K), []
        for t in range(T):
            S = alpha[t] * (S - beta[t, 0] * torch.outer(S @ keys[t, 0], keys[t, 0]))
            S = S + sum(beta[t, l] * torch.outer(deltas[l][t], keys[t, l]) for l in range(2))
            outputs.append(S @ q[t])
        heads.append(rms(torch.stack(outputs), p["norm.norm.weight"]) * F.silu(x @ p["gate.weight"][values].T))
    assert_close("y", mixer(x.unsqueeze(0))[0][0], torch.cat(heads, -1) @ p["out.weight"].T, 1e-11)


CHOICES = st.fixed_dictionaries(
    {
        "steps": st.integers(2, 4),
        "erase": st.sampled_from(["tied", "head", "channel"]),
        "forget": st.sampled_from(["head", "channel"]),
        "gate_by": st.sampled_from(["silu", "sigmoid"]),
        "scaling": st.sampled_from(["channel", "head", "fixed"]),
        "key_rank": st.sampled_from([0, 3]),
        "qkv_conv": st.booleans(),
        "residual": st.sampled_from(["anchored", "value"]),
        "solver": st.sampled_from(["closed", "gelu"]),
    }
)


@pytest.mark.parametrize(
    ("keys", "conv_size"),
    [("own", 3), ("orthogonal", 3), ("convolved", 3), ("convolved", 1), ("rotated", 3), ("previous", 3), ("shared", 1)],
)
@settings(max_examples=3, deadline=None)
@given(options=CHOICES, seed=st.integers(0, 99), cut=st.integers(1, 10), form=st.sampled_from(FORMS))
def test_forms_segments_documents_and_padding_agree(
    keys: str, conv_size: int, options: dict[str, Any], seed: int, cut: int, form: str
) -> None:
    torch.manual_seed(seed)
    sizes = {"key_dim": K, "value_dim": V, "conv_size": conv_size}
    mixer, n = Mixer("prism", D, H, keys=keys, **sizes, **options).double(), 11
    x, reset = torch.randn(2, n, D, dtype=torch.float64), torch.rand(2, n) < 0.2
    whole, state = mixer(x, reset=reset, form="recurrent")
    other, other_state = mixer(x, reset=reset, form=form)
    first, middle = mixer(x[:, :cut], reset=reset[:, :cut], form=form)
    second, last = mixer(x[:, cut:], middle, reset=reset[:, cut:])
    tokens, one = [], None
    for t in range(n):
        y, one = mixer(x[:, t : t + 1], one, reset=reset[:, t : t + 1])
        tokens.append(y)
    for y, after in ((other, other_state), (torch.cat([first, second], 1), last), (torch.cat(tokens, 1), one)):
        assert_close("y", y, whole, 1e-10)
        for name, value in state.tensors().items():
            assert_close(name, after.tensors()[name], value, 1e-10)
    began = int(reset[0].nonzero()[-1]) if reset[0].any() else 0
    assert_close("document", mixer(x[:1, began:])[0], whole[:1, began:], 1e-10)
    mask = torch.rand(2, n) < 0.7
    mask[:, 0] = True
    padded, after = mixer(x, mask=mask)
    for row in range(2):
        alone, alone_state = mixer(x[row : row + 1, mask[row]])
        assert_close("padded", padded[row : row + 1, mask[row]], alone, 1e-10)
        for name, value in alone_state.tensors().items():
            assert_close(name, after.tensors()[name][row : row + 1], value, 1e-10)


def test_rotated_keys_start_orthogonal_to_the_first_and_keep_its_length() -> None:
    rule = Mixer("prism", 32, 2, steps=4, keys="rotated").double().rule
    update, _, _ = rule.update(torch.randn(2, 5, 32, dtype=torch.float64), {}, rules.rule.Span())
    first, later = update.k[..., :1, :], update.k[..., 1:, :]
    assert (first * later).sum(-1).abs().max() < 1e-7
    assert_close("length", later.norm(dim=-1), first.norm(dim=-1).expand(-1, -1, -1, 3), 1e-7)
    correlation = later @ later.transpose(-1, -2) - torch.eye(3).double()
    assert correlation.abs().max() < 0.95, "the later keys differ from each other, too"
    assert rule.writes.angle.abs().sub(math.pi / 2).abs().max() < 1e-6


def test_a_layer_subtracts_what_the_layer_below_has_read() -> None:
    """Each layer leaves its own entry: one that is computed again in the backward pass finds what it found before."""
    first, second = (Mixer("prism", D, H, residual="below", layer_index=i).double() for i in range(2))
    x, shared = torch.randn(2, 6, D, dtype=torch.float64), dict[str, Tensor]()
    assert relative_error(first(x, shared=shared)[0], first(x)[0]) == 0
    assert "rule.writes.expected.up.weight" not in first.state_dict()
    got, plain = second(x, shared=dict(shared))[0], second(x)[0]
    assert relative_error(got, plain) > 1e-4
    seen: list[Tensor | None] = []
    writes = second.rule.get_submodule("writes")
    assert isinstance(writes, ResidualWrites)
    writes.register_forward_hook(lambda module, given, found: seen.append(found[0].expected))
    second(x, shared=shared)
    (read,) = (value for name, value in shared.items() if name.endswith("0"))
    assert len(shared) == 2 and seen[0] is not None
    scaled = read / (read.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close("expected", seen[0].flatten(2), writes.expected(scaled.flatten(2)), 1e-12)
    other = Mixer("prism", D, H, residual="below", layer_index=2, value_dim=3).double()
    with pytest.raises(ValueError, match="residual='below' needs layers with equal heads: 2 of 3 values here"):
        other(x, shared=shared)


def test_new_options_take_the_ordinary_way_in_decoding() -> None:
    """The kernel of a whole layer's token knows own and shared keys, one strength and maps of the anchor."""
    served = [{}, {"keys": "shared"}, {"scaling": "head"}, {"scaling": "fixed"}, {"up_std": 0.1}]
    served += [{"qkv_conv": False}, {"forget": "channel"}, {"forget": "channel", "steps": 1}, {"gate_by": "silu"}]
    others = [
        *({"keys": keys} for keys in ("orthogonal", "convolved", "rotated", "previous")),
        *({"erase": erase} for erase in ("head", "channel")),
        {"key_rank": 0},
        {"residual": "below", "layer_index": 1},
        {"steps": 1, "erase": "head"},
    ]
    for options in served:
        plan = Block("prism", 16, 2, 0, **options).mixer.rule.current_decoding_weights()
        assert plan is not None and plan.has_kernel, options
    assert all(Block("prism", 16, 2, 0, **options).mixer.rule.current_decoding_weights() is None for options in others)


def test_the_second_halves_of_maps_start_as_asked() -> None:
    for name in ("key", "gain"):
        std = Mixer("prism", 256, 2, up_std=0.5).state_dict()[f"rule.writes.{name}.up.weight"].std()
        assert abs(std - 0.5) < 0.05


@pytest.mark.parametrize(
    ("options", "gate_by"),
    [
        ({}, "sigmoid"),
        ({"steps": 4, "forget": "channel"}, "sigmoid"),
        ({"step_scale": (1.0, 0.1)}, "sigmoid"),
        ({"steps": 1}, "silu"),
        ({"step_scale": 0}, "silu"),
        ({"step_scale": 0.0, "gate_by": "sigmoid"}, "sigmoid"),
        ({"steps": 1, "gate_by": "sigmoid"}, "sigmoid"),
        ({"gate_by": "silu"}, "silu"),
        ({"gate": False}, "silu"),
    ],
)
def test_the_gate_is_gated_deltanet_s_where_the_layer_begins_as_it(options: dict[str, Any], gate_by: str) -> None:
    assert Mixer("prism", 16, 2, **options).rule.gate_by == gate_by


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"keys": "other"}, "keys must be one of own, orthogonal, .*, got 'other'"),
        ({"gate": False, "gate_by": "sigmoid"}, "gate_by is that of the output gate: set gate=True, or omit it"),
        ({"gate_by": "tanh"}, "gate_by must be one of silu, sigmoid, got 'tanh'"),
        ({"forget": "all"}, "forget must be one of head, channel, got 'all'"),
        ({"erase": "all"}, "erase must be one of tied, head, channel, got 'all'"),
        ({"scaling": "row"}, "scaling must be one of channel, head, fixed, got 'row'"),
        ({"residual": "above"}, "residual must be one of anchored, value, below, got 'above'"),
        ({"preset": "paper", "residual": "below"}, "residual must be one of anchored, value, got 'below'"),
        ({"keys": "previous", "shared_key": True}, "shared_key=True is keys='shared', but keys is 'previous'"),
        ({"keys": "rotated", "key_dim": 5}, "key_dim must be even for keys='rotated', got 5"),
        ({"rank": "x"}, "^rank must be an integer ≥ 0, got 'x'"),
        ({"key_rank": -1}, "key_rank must be an integer ≥ 0, got -1"),
    ],
)
def test_bad_choices_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Mixer("prism", 16, 2, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"residual": "below"},
        {"keys": "previous", "erase": "channel"},
        {"forget": "channel"},
        {"preset": "paper", "gate": True, "qkv_conv": True},
    ],
    ids=str,
)
def test_a_model_is_the_same_recomputed_decoded_and_padded(options: dict[str, Any]) -> None:
    config = PrismConfig(32, 16, 2, "prism", 3, rule_options={"prism": options})
    model, ids = PrismForCausalLM(config).train(), torch.randint(0, 32, (2, 14))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        return [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]

    plain = gradients()
    for layer in model.model.layers:
        layer.recompute = True
    recomputed = gradients()
    for layer in model.model.layers:
        layer.recompute = False
    model.gradient_checkpointing_enable()
    for other in (recomputed, gradients()):
        for a, b in zip(other, plain, strict=True):
            assert_close("gradient", a, b, 1e-5)
    model.gradient_checkpointing_disable()
    model.eval()
    with torch.no_grad():
        whole, prompt = model(ids).logits, model(ids[:, :6], use_cache=True)
        cache = prompt.past_key_values
        parts = [prompt.logits, *(model(token, past_key_values=cache).logits for token in ids[:, 6:].split(1, 1))]
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        padded = model(ids, attention_mask=mask).logits
    assert_close("decoded", torch.cat(parts, 1), whole, 1e-5)
    assert_close("padded", padded[:1, 5:], model(ids[:1, 5:]).logits, 1e-5)
