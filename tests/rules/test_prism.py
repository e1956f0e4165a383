"""PRISM against its equations in plain loops, Gated DeltaNet as its L = 1, and the effect of every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prism import Mixer, rules
from prism.engine import FORMS
from prism.rules.prism import PaperPrism, Prism
from tests.helpers import assert_close, relative_error


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def convolve(x: Tensor, taps: Tensor) -> Tensor:
    """SiLU of the causal convolution of one sequence `[T, D]`; the last of `taps` `[4, D]` meets the newest token."""
    padded = torch.cat([x.new_zeros(len(taps) - 1, x.shape[1]), x])
    return F.silu(sum(taps[i] * padded[i : i + len(x)] for i in range(len(taps))))


def corrections(r: Tensor, gains: list[Tensor], solver: str) -> list[Tensor]:
    """The paper's loop; `closed` as the product it is meant to equal."""
    deltas = []
    if solver == "gelu":
        for p in gains:
            deltas.append(F.gelu(p * r))
            r = r - deltas[-1]
        return deltas
    left = torch.ones_like(r)
    for p in gains:
        deltas.append(p.sigmoid() * left * r)
        left = left * (1 - p.sigmoid())
    return deltas


def remember(
    T: int, alpha: Tensor, beta: Tensor, keys: list[Tensor], writes: list[Tensor], q: Tensor
) -> tuple[Tensor, Tensor]:
    """S_t = α S_{t-1}(I - β₁ k₁ k₁ᵀ) + Σ w_l k_lᵀ in the paper's own, value-first layout, for one head."""
    S = q.new_zeros(writes[0].shape[-1], q.shape[-1])
    outputs = []
    for t in range(T):
        k = keys[0][t]
        S = alpha[t] * S @ (torch.eye(len(k), dtype=k.dtype) - beta[t] * torch.outer(k, k))
        S = S + sum(torch.outer(w[t], k[t]) for w, k in zip(writes, keys, strict=True))
        outputs.append(S @ q[t])
    return torch.stack(outputs), S.T


def rms(o: Tensor, weight: Tensor) -> Tensor:
    return o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def perturbed(mixer: Mixer) -> Mixer:
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixer.double()


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("solver", ["gelu", "closed"])
def test_paper_is_its_equations(steps: int, solver: str) -> None:
    D, H, K, T = 8, 2, 3, 9
    V = D // H
    mixer = perturbed(Mixer("prism", D, H, preset="paper", steps=steps, solver=solver, key_dim=K))
    p = {name.removeprefix("rule."): value for name, value in mixer.state_dict().items()}
    x = torch.randn(T, D, dtype=torch.float64)
    u = convolve(x, p["conv.weight"])
    heads, memories = [], []
    for h in range(H):
        values, key_rows = slice(h * V, (h + 1) * V), slice(h * K, (h + 1) * K)
        v = u @ p["value.weight"][values].T
        q = unit(u @ p["query.weight"][key_rows].T) / K**0.5
        maps_k = p["key.weight"].view(H, steps, K, D)[h]
        maps_p = p["gain.weight"].view(H, steps, V, D)[h]
        beta = (u @ p["beta.weight"].view(H, steps, D)[h].T).sigmoid()
        alpha = (u @ p["alpha.weight"][h] + p["alpha.bias"][h]).sigmoid()
        deltas = corrections(v - u[:, values], [u @ m.T for m in maps_p], solver)
        writes = [beta[:, l : l + 1] * delta for l, delta in enumerate(deltas)]
        o, S = remember(T, alpha, beta[:, 0], [unit(u @ m.T) for m in maps_k], writes, q)
        heads.append(rms(o, p["norm.norm.weight"]))
        memories.append(S)
    y, state = mixer(x.unsqueeze(0))
    assert_close("y", y[0], torch.cat(heads, -1) @ p["out.weight"].T, 1e-12)
    assert_close("memory", state.memory[0], torch.stack(memories), 1e-12)


@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("solver", ["gelu", "closed"])
@pytest.mark.parametrize("residual", ["anchored", "value"])
def test_lm_is_its_equations(steps: int, solver: str, residual: str) -> None:
    D, H, K, V, T, n = 8, 2, 3, 4, 9, steps - 1
    options = {"steps": steps, "solver": solver, "residual": residual, "key_dim": K, "value_dim": V}
    mixer = perturbed(Mixer("prism", D, H, **options))
    p = {name.removeprefix("rule."): value for name, value in mixer.state_dict().items()}
    x = torch.randn(T, D, dtype=torch.float64)
    qs, ks, vs = convolve(x @ p["qkv.weight"].T, p["conv.weight"]).split([H * K, H * K, H * V], -1)
    u = convolve(x, p["writes.conv.weight"])

    def low_rank(name: str) -> Tensor:
        return u @ p[f"writes.{name}.down.weight"].T @ p[f"writes.{name}.up.weight"].T

    heads, memories = [], []
    for h in range(H):
        values, key_rows = slice(h * V, (h + 1) * V), slice(h * K, (h + 1) * K)
        q, k1, v = unit(qs[:, key_rows]) / K**0.5, unit(ks[:, key_rows]), vs[:, values]
        beta1 = (x @ p["beta.weight"][h]).sigmoid()
        step_size = F.softplus(x @ p["decay_in.weight"][h] + p["decay.dt_bias"][h])
        alpha = torch.exp(-p["decay.A_log"][h].exp() * step_size)
        r = v - low_rank("expected")[:, values] if residual == "anchored" else v
        gains = low_rank("gain").view(T, H, n, V)[:, h]
        keys = unit(low_rank("key").view(T, H, n, K)[:, h])
        beta = (u @ p["writes.beta.weight"].view(H, n, D)[h].T).sigmoid()
        deltas = corrections(r, [gains[:, l] for l in range(n)], solver)
        scale = p["writes.scale"]  # [L - 1, H, V]
        writes = [beta1[:, None] * v] + [scale[l, h] * beta[:, l : l + 1] * deltas[l] for l in range(n)]
        o, S = remember(T, alpha, beta1, [k1, *(keys[:, l] for l in range(n))], writes, q)
        opened = x @ p["gate.weight"][values].T
        gate = opened.sigmoid() if steps > 1 else F.silu(opened)
        heads.append(rms(o, p["norm.norm.weight"]) * gate)
        memories.append(S)
    y, state = mixer(x.unsqueeze(0))
    assert_close("y", y[0], torch.cat(heads, -1) @ p["out.weight"].T, 1e-12)
    assert_close("memory", state.memory[0], torch.stack(memories), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {"negative_eigenvalues": True, "value_dim": 5},
        {"gate": False, "conv_size": 1},
        {"forget": "channel", "gate_by": "sigmoid"},
        {},
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_lm_with_one_step_is_gated_delta(form: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """The same names, the same weights, the same bits."""
    prism = Mixer("prism", 32, 2, preset="lm", steps=1, **options).to(dtype)
    delta = Mixer("gated_delta", 32, 2, **options).to(dtype)
    x = torch.randn(2, 70, 32, dtype=dtype)
    assert prism.state_dict().keys() == delta.state_dict().keys()
    assert not torch.equal(prism(x)[0], delta(x)[0])
    delta.load_state_dict(prism.state_dict(), strict=True)
    y, state = prism(x, form=form)
    same, same_state = delta(x, form=form)
    assert torch.equal(y, same)
    assert all(torch.equal(value, same_state.tensors()[name]) for name, value in state.tensors().items())
    another = Mixer("gated_delta", 32, 2, **options).to(dtype)
    prism.load_state_dict(another.state_dict(), strict=True)
    assert torch.equal(prism(x, form=form)[0], another(x, form=form)[0])


@pytest.mark.parametrize("steps", [2, 3, 4])
@pytest.mark.parametrize("solver", ["gelu", "closed"])
def test_step_scale_zero_begins_as_gated_delta(steps: int, solver: str) -> None:
    """An adapter must not change the model it is put on; but γ can learn from the first step."""
    adapted = Mixer("prism", 32, 2, steps=steps, solver=solver, step_scale=0.0)
    delta = Mixer("gated_delta", 32, 2)
    missing, unexpected = adapted.load_state_dict(delta.state_dict(), strict=False)
    assert not unexpected
    assert missing and all(name.startswith("rule.writes.") for name in missing)
    x = torch.randn(2, 70, 32)
    for form in FORMS:
        y, state = adapted(x, form=form)
        same, same_state = delta(x, form=form)
        assert torch.equal(y, same), form
        assert torch.equal(state.memory, same_state.memory), form
    adapted(x)[0].square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in adapted.named_parameters() if "scale" in name}
    assert gradients and all(g is not None and g.norm() > 0 for g in gradients.values())


PRESETS: list[tuple[dict[str, Any], int]] = [
    ({"preset": preset, "solver": solver, "residual": residual}, steps)
    for preset in ("paper", "lm")
    for solver in ("gelu", "closed")
    for residual in ("anchored", "value")
    for steps in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("options", "steps"), PRESETS)
def test_the_write_has_rank_l(options: dict[str, Any], steps: int) -> None:
    """From an empty memory the first token leaves Σ_l k_l w_lᵀ alone."""
    mixer = Mixer("prism", 32, 2, steps=steps, **options).double()
    assert mixer.write_rank == steps
    x = torch.randn(20, 1, 32, dtype=torch.float64)
    _, state = mixer(x)
    assert state.memory.shape[-2] > 4 and state.memory.shape[-1] > 4
    assert (torch.linalg.matrix_rank(state.memory, rtol=1e-9) == steps).all()


@pytest.mark.parametrize("preset", ["paper", "lm"])
def test_a_shared_key_leaves_rank_one(preset: str) -> None:
    mixer = Mixer("prism", 32, 2, preset=preset, steps=4, shared_key=True).double()
    _, state = mixer(torch.randn(20, 1, 32, dtype=torch.float64))
    assert (torch.linalg.matrix_rank(state.memory, rtol=1e-9) == 1).all()


@pytest.mark.parametrize("preset", ["paper", "lm"])
@pytest.mark.parametrize(
    ("switch", "gone"),
    [({"gain": False}, "gain"), ({"residual": "value"}, "expected"), ({"shared_key": True}, "key")],
)
def test_a_switched_off_part_has_no_parameters(preset: str, switch: dict[str, Any], gone: str) -> None:
    def parameters(**options: Any) -> int:
        return sum(p.numel() for p in Mixer("prism", 32, 2, preset=preset, steps=3, **options).parameters())

    if preset == "paper" and gone == "expected":  # its anchor is u itself
        assert parameters(**switch) == parameters()
    else:
        assert parameters(**switch) < parameters()


@pytest.mark.parametrize("width", [512, 1024, 2048])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_the_language_preset_adds_less_than_a_tenth(width: int, steps: int) -> None:
    def parameters(name: str, **options: Any) -> int:
        return sum(p.numel() for p in Mixer(name, width, width // 128, **options).parameters())

    with torch.device("meta"):
        plain, extended = parameters("gated_delta"), parameters("prism", steps=steps)
    assert plain < extended < 1.1 * plain


def test_low_rank_maps_are_as_wide_as_documented() -> None:
    for width, rank in ((32, 8), (512, 16)):
        mixer = Mixer("prism", width, 2)
        assert mixer.state_dict()["rule.writes.key.down.weight"].shape == (rank, width)
    assert Mixer("prism", 32, 2, rank=5).state_dict()["rule.writes.key.down.weight"].shape == (5, 32)


def test_paper_needs_values_as_wide_as_the_tokens() -> None:
    with pytest.raises(ValueError, match=r"value_dim.*width.*2 · 5 ≠ 16"):
        Mixer("prism", 16, 2, preset="paper", value_dim=5)
    Mixer("prism", 16, 2, preset="paper", value_dim=5, residual="value")
    with pytest.raises(ValueError, match="width"):
        Mixer("prism", 17, 2, preset="paper")


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_paper_forgets_at_rates_from_nine_tenths_to_nearly_nothing(heads: int) -> None:
    """With u = 0 the decay is its bias: α = .9 … .999 over the heads. A silent token after a loud one shows it."""
    mixer = Mixer("prism", 8 * heads, heads, preset="paper", conv_size=1).double()
    x = torch.zeros(1, 2, 8 * heads, dtype=torch.float64)
    x[:, 0] = torch.randn(8 * heads, dtype=torch.float64)
    _, loud = mixer(x[:, :1])
    _, silent = mixer(x[:, 1:], loud)
    kept = silent.memory.flatten(2).norm(dim=-1) / loud.memory.flatten(2).norm(dim=-1)
    assert_close("α", kept[0, [0, -1]], torch.tensor([0.9, 0.999]).double(), 1e-6)
    assert (kept[0].diff() > 0).all()


@pytest.mark.parametrize("preset", ["paper", "lm"])
@pytest.mark.parametrize("negative", [False, True])
def test_the_transition_never_grows(preset: str, negative: bool) -> None:
    """What is remembered of one state fades, even with reflections: no eigenvalue beyond ±1."""
    mixer = perturbed(Mixer("prism", 16, 2, preset=preset, negative_eigenvalues=negative))
    x = 3 * torch.randn(1, 50, 16, dtype=torch.float64)
    _, one = mixer(x[:, :5])
    _, with_it = mixer(x[:, 5:], one)
    zero = one.map(torch.clone)
    zero.memory.zero_()
    _, without = mixer(x[:, 5:], zero)
    assert (with_it.memory - without.memory).norm() <= one.memory.norm()


@pytest.mark.parametrize(
    "change", [{"solver": "gelu"}, {"residual": "value"}, {"gain": False}, {"nonlinearity": False}]
)
@pytest.mark.parametrize("preset", ["paper", "lm"])
def test_every_switch_changes_the_output(preset: str, change: dict[str, Any]) -> None:
    base = {"preset": preset, "steps": 3, "solver": "closed"}
    mixer, switched = Mixer("prism", 16, 2, **base), Mixer("prism", 16, 2, **{**base, **change})
    switched.load_state_dict({k: v for k, v in mixer.state_dict().items() if k in switched.state_dict()})
    x = torch.randn(1, 10, 16)
    assert relative_error(switched(x)[0], mixer(x)[0]) > 1e-4


def test_the_rule_prism_is_the_lm_layer_and_paper_a_separate_class() -> None:
    assert type(Mixer("prism", 8, 2).rule) is Prism is rules.get("prism")
    assert type(Mixer("prism", 8, 2, preset="paper").rule) is PaperPrism
    assert Prism.option_names()[0] == "preset"
    assert set(PaperPrism.option_names()) < set(Prism.option_names())
    for preset in ("lm", "paper"):
        assert Mixer("prism", 8, 2, preset=preset).rule.name == "prism"
    with pytest.raises(ValueError, match="preset must be one of lm, paper, got 'big'"):
        Mixer("prism", 8, 2, preset="big")
