"""Rules agree with other implementations: flash-linear-attention's naive loops and transformers' layers, in float32 on the CPU.

A rule's update on random input is passed to the naive function of that mechanism; its outputs and final state
must be those of `prism.memory`. Argument orders and scales are theirs: most multiply q by K^-½, which the rules have done.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import prism
from prism import Update
from prism.rules.rule import Span
from tests.helpers import assert_close
from tests.reference_code import load_all, transformers_module
from tests.rules.rule_cases import HEADS, WIDTH, perturbed_rule

BATCH, TOKENS = 2, 37
TOLERANCE = 1e-5


class NaiveInputs:
    """A rule's update in the shapes that the naive functions expect: `[B, T, H, …]`, one write per step."""

    def __init__(self, update: Update, state: Tensor) -> None:
        self.state, self.root = state, update.key_dim**0.5
        self.q, self.k = (self._all_heads(z, update.heads) for z in (update.q, update.k.squeeze(3)))
        self.w, self.g, self.beta = update.w.squeeze(3), update.log_decay, update.erase_strength
        self.v = self.w if self.beta is None else self.w / self.beta.unsqueeze(-1)
        self.look, self.take = update.erase_key, update.erase_write

    @staticmethod
    def _all_heads(z: Tensor, heads: int) -> Tensor:
        return z.repeat_interleave(heads // z.shape[2], 2)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [z.transpose(1, 2) for z in tensors]


def _linear(fla: SimpleNamespace, t: NaiveInputs, rule: Any) -> tuple[Tensor, Tensor]:
    return fla.naive_recurrent_linear_attn(t.q, t.k, t.w, 1.0, t.state, True)


def _simple_gla(fla: SimpleNamespace, t: NaiveInputs, rule: Any) -> tuple[Tensor, Tensor]:
    return fla.naive_recurrent_simple_gla(t.q, t.k, t.w, t.g, scale=1.0, initial_state=t.state)


def _gla(fla: SimpleNamespace, t: NaiveInputs, rule: Any) -> tuple[Tensor, Tensor]:
    return fla.naive_recurrent_gla(t.q * t.root, t.k, t.w, t.g, t.state, True)


def _rwkv6(fla: SimpleNamespace, t: NaiveInputs, rule: Any) -> tuple[Tensor, Tensor]:
    o, state = fla.naive_recurrent_rwkv6(*_heads_first(t.q, t.k, t.w, t.g), rule.bonus, 1.0, t.state, True)
    return o.transpose(1, 2), state


def _rwkv7(fla: SimpleNamespace, t: NaiveInputs, rule: Any) -> tuple[Tensor, Tensor]:
    o, state = fla.dplr_recurrence(*_heads_first(t.q * t.root, t.k, t.w, -t.look, t.take, t.g), t.state)
    return o.transpose(1, 2), state


def _delta(fla: SimpleNamespace, t: NaiveInputs, rule: Any) -> tuple[Tensor, Tensor]:
    o, state = fla.delta_rule_recurrence(*_heads_first(t.q * t.root, t.k, t.v, t.beta), t.state)
    return o.transpose(1, 2), state


def _gated_delta(fla: SimpleNamespace, t: NaiveInputs, rule: Any) -> tuple[Tensor, Tensor]:
    return fla.naive_recurrent_gated_delta_rule(t.q, t.k, t.v, t.beta, t.g, 1.0, t.state, True)


def _kda(fla: SimpleNamespace, t: NaiveInputs, rule: Any) -> tuple[Tensor, Tensor]:
    return fla.naive_recurrent_kda(t.q, t.k, t.v, t.g, t.beta, 1.0, t.state, True)


def _comba(fla: SimpleNamespace, t: NaiveInputs, rule: Any) -> tuple[Tensor, Tensor]:
    """The chunked one: it reads the undecayed state as the published kernels do, which the naive loop does not."""
    share = rule.share.sigmoid()
    beta = t.beta / share
    v, p = t.w / beta.unsqueeze(-1), share.unsqueeze(-1) * t.k
    return fla.naive_chunk_comba(t.q, t.k, v, p, t.g, beta, 16, 1.0, t.state, True)


def _gdn2(fla: SimpleNamespace, t: NaiveInputs, rule: Any) -> tuple[Tensor, Tensor]:
    """Its gates from the update: the erase key over the key, and all of w as a write gate of the value 1."""
    return fla.naive_recurrent_gdn2(t.q, t.k, torch.ones_like(t.w), t.g, t.look / t.k, t.w, 1.0, t.state, True)


def _delta_product(fla: SimpleNamespace, t: NaiveInputs, rule: Any) -> tuple[Tensor, Tensor]:
    n = rule.write_rank
    return fla.naive_recurrent_gated_delta_product(t.q, t.k, t.v, t.g, t.beta, 1.0, None, t.state, True, n)


Reference = Callable[[SimpleNamespace, NaiveInputs, Any], tuple[Tensor, Tensor]]
REFERENCES: list[tuple[str, dict[str, Any], Reference]] = [
    ("linear", {}, _linear),
    ("retnet", {}, _simple_gla),
    ("lightning", {"layer_index": 1, "layer_count": 4}, _simple_gla),
    ("gated_retention", {}, _simple_gla),
    ("mamba2", {"groups": 2}, _simple_gla),
    ("gla", {}, _gla),
    ("hgrn2", {"layer_index": 1, "layer_count": 3}, _gla),
    ("rwkv6", {}, _rwkv6),
    ("delta", {}, _delta),
    ("delta", {"negative_eigenvalues": True}, _delta),
    ("efla", {}, _delta),
    ("gated_delta", {}, _gated_delta),
    ("comba", {}, _comba),
    ("kda", {}, _kda),
    ("gdn2", {}, _gdn2),
    ("gdn2", {"negative_eigenvalues": True}, _gdn2),
    ("rwkv7", {}, _rwkv7),
    ("delta_product", {"householders": 1}, _delta_product),
    ("delta_product", {"householders": 2}, _delta_product),
    ("delta_product", {"householders": 3, "forget_gate": True}, _delta_product),
]


def random_update(rule: Any, tokens: int = TOKENS) -> tuple[Update, Any, Tensor]:
    """A rule's update on random input, what it keeps for its output, and a random incoming state."""
    with torch.no_grad():
        update, _, extra = rule.update(torch.randn(BATCH, tokens, WIDTH), {}, Span())
    return update, extra, torch.randn(BATCH, update.heads, update.key_dim, update.value_dim)


@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
@pytest.mark.parametrize(
    ("name", "options", "reference"), REFERENCES, ids=["-".join([n, *map(str, o)]) for n, o, _ in REFERENCES]
)
def test_naive_loops(fla: SimpleNamespace, name: str, options: dict[str, Any], reference: Reference, form: str) -> None:
    rule = perturbed_rule(name, **options)
    update, extra, state = random_update(rule)
    expected, final = reference(fla, NaiveInputs(update, state), rule)
    o, new = prism.memory(update, state, form)
    if name == "rwkv6":  # its read is S_{t-1}; the naive loop adds the token's own share inside
        o = o + extra.bonus(rule.bonus)
    assert_close("outputs", o, expected, TOLERANCE)
    assert_close("final state", new, final, TOLERANCE)


def test_normalised_linear_attention(fla: SimpleNamespace) -> None:
    rule = perturbed_rule("linear", normalize=True, eps=1e-10)
    rule.out = torch.nn.Identity()
    update, _, _ = random_update(rule)
    values = update.w.squeeze(3)[..., :-1]
    expected, _ = fla.naive_recurrent_linear_attn(update.q, update.k.squeeze(3), values, 1.0, normalize=True)
    o, _ = prism.memory(update)
    assert_close("outputs", rule.output(o, None, None), expected.flatten(-2), TOLERANCE)


def test_retention_has_the_decays_of_retnet(fla: SimpleNamespace) -> None:
    rule = perturbed_rule("retnet")
    update, _, _ = random_update(rule)
    root = update.key_dim**0.5
    expected = fla.naive_retention(*_heads_first(update.q * root, update.k.squeeze(3), update.w.squeeze(3)))
    assert_close("outputs", prism.memory(update)[0], expected.transpose(1, 2), TOLERANCE)


def test_transformers_chunked_gated_delta_rule() -> None:
    module = transformers_module("qwen3_next")
    update, _, state = random_update(perturbed_rule("gated_delta"), tokens=130)
    t = NaiveInputs(update, state)
    expected, final = inspect.unwrap(module.torch_chunk_gated_delta_rule)(
        t.q * t.root, t.k, t.v, g=t.g, beta=t.beta, initial_state=state, output_final_state=True
    )
    o, new = prism.memory(update, state)
    assert_close("outputs", o, expected, TOLERANCE)
    assert_close("final state", new, final, TOLERANCE)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda_gates(fla: SimpleNamespace, lower_bound: float | None) -> None:
    rule: Any = perturbed_rule("kda", lower_bound=lower_bound)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    z = rule.decay_in(x).unflatten(-1, (HEADS, -1))
    if lower_bound is None:
        expected = fla.naive_kda_gate(z, rule.decay.A_log, rule.decay.dt_bias)
    else:
        expected = fla.naive_kda_lowerbound_gate(z, rule.decay.A_log, rule.decay.dt_bias, lower_bound)
    assert_close("log-decay", rule.beta_and_decay(x)[1], expected, TOLERANCE)


def test_the_whole_gated_delta_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = transformers_module("qwen3_next", monkeypatch)
    ours: Any = perturbed_rule("gated_delta")
    config = SimpleNamespace(
        hidden_size=WIDTH,
        linear_num_value_heads=HEADS,
        linear_num_key_heads=HEADS,
        linear_key_head_dim=ours.key_dim,
        linear_value_head_dim=ours.value_dim,
        linear_conv_kernel_dim=4,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        layer_types=["linear_attention"],
    )
    theirs = module.Qwen3NextGatedDeltaNet(config, 0).eval()

    def by_head(*weights: Tensor) -> Tensor:  # theirs: head by head, ours: one map after the other
        return torch.cat([z.unflatten(0, (HEADS, -1)) for z in weights], 1).flatten(0, 1)

    load_all(
        theirs,
        {
            "in_proj_qkvz": by_head(*ours.qkv.weight.split(ours.sizes), ours.gate.weight),
            "in_proj_ba": by_head(ours.beta.weight, ours.decay_in.weight),
            "conv1d": ours.conv.weight.T.unsqueeze(1),
            "dt_bias": ours.decay.dt_bias,
            "A_log": ours.decay.A_log,
            "norm": ours.norm.norm.weight,
            "out_proj": ours.out.weight,
        },
    )
    _same_layer(ours, theirs)


def test_the_whole_kda_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = transformers_module("kimi_linear", monkeypatch)
    size = WIDTH // HEADS
    config = SimpleNamespace(
        hidden_size=WIDTH,
        linear_num_heads=HEADS,
        linear_head_dim=size,
        linear_conv_kernel_dim=4,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        layer_types=["linear_attention"],
    )
    theirs = module.KimiLinearDeltaAttention(config, 0).eval()
    ours: Any = perturbed_rule("kda")
    torch.nn.init.zeros_(ours.gate.up.bias)  # theirs has none
    load_all(
        theirs,
        {
            **dict(zip(("q_proj", "k_proj", "v_proj"), ours.qkv.weight.split(ours.sizes), strict=True)),
            "conv1d": ours.conv.weight.T.unsqueeze(1),
            "forget_gate.f_a_proj": ours.decay_in.down.weight,
            "forget_gate.f_b_proj": ours.decay_in.up.weight,
            "forget_gate.dt_bias": ours.decay.dt_bias,
            "forget_gate.A_log": ours.decay.A_log.view(1, 1, -1, 1),
            "b_proj": ours.beta.weight,
            "g_a_proj": ours.gate.down.weight,
            "g_b_proj": ours.gate.up.weight,
            "o_norm": ours.norm.norm.weight,
            "o_proj": ours.out.weight,
        },
    )
    _same_layer(ours, theirs)


def test_the_whole_mamba2_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = transformers_module("mamba2", monkeypatch)
    from transformers import Mamba2Config

    groups, state = 2, 6
    config = Mamba2Config(
        num_heads=HEADS,
        head_dim=2 * WIDTH // HEADS,
        hidden_size=WIDTH,
        state_size=state,
        n_groups=groups,
        chunk_size=16,
        num_hidden_layers=1,
    )
    theirs = module.Mamba2Mixer(config, 0).eval()
    if hasattr(theirs.norm, "group_size"):  # as of transformers 5.23 a norm for each group; the rule has one for all
        theirs.norm.group_size = 2 * WIDTH
    ours: Any = perturbed_rule("mamba2", groups=groups, key_dim=state)

    def reorder(z: Tensor) -> Tensor:  # ours: C, B, x; theirs: x, B, C
        return torch.cat(z.split(ours.sizes)[::-1])

    projections = [ours.gate.weight, reorder(ours.qkv.weight), ours.decay_in.weight]
    load_all(
        theirs,
        {
            "in_proj": torch.cat(projections),
            "conv1d": reorder(ours.conv.weight.T).unsqueeze(1),
            "conv1d.bias": reorder(ours.conv.bias),
            "dt_bias": ours.decay.dt_bias,
            "A_log": ours.decay.A_log,
            "D": ours.skip,
            "norm": ours.norm.norm.weight,
            "out_proj": ours.out.weight,
        },
    )
    _same_layer(ours, theirs)


def _same_layer(ours: Any, theirs: torch.nn.Module) -> None:
    x = torch.randn(BATCH, TOKENS, WIDTH)
    with torch.no_grad():
        update, _, extra = ours.update(x, {}, Span())
        o, _ = prism.memory(update)
        assert_close("layer", ours.output(o, x, extra), theirs(x), TOLERANCE)


def test_naive_values_undo_the_step_size() -> None:
    """Guards the helper above: the naive functions multiply by β again."""
    update, _, state = random_update(perturbed_rule("gated_delta"))
    t = NaiveInputs(update, state)
    assert_close("w", replace(update, w=(t.v * t.beta.unsqueeze(-1)).unsqueeze(3)).w, update.w, 1e-6)
