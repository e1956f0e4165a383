"""Network memories: every form against gradient descent by autograd, for split, padded and packed sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import prism
from prism.engine.networks import Averaged, InnerUpdate, Momentum, Network, chunkwise
from prism.engine.networks.layout import take
from prism.engine.networks.network import gelu, gelu_slope, normalize, normalize_backward, orthogonalize
from prism.rules.neural_memory import Polynomial
from tests.helpers import Tensors, assert_close, examples, relative_error

GATES = ("log_decay", "log_momentum", "step")
STREAMS = ("q", "k", "v", "rate", *GATES)
"""The tensors with a token axis."""


@dataclass(frozen=True)
class Problem:
    """Describes a random update. Its printed form reproduces it."""

    tokens: int = 11
    batch: int = 2
    heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    depth: int = 2
    bias: bool = True
    norm: bool = True
    residual: bool = True
    mini_batch: int = 4
    averaged: bool = True
    gates: tuple[str, ...] = GATES
    window: int = 1
    newton_schulz: int = 0
    seed: int = 0

    def tensors(self) -> Tensors:
        """Numbers that float32 can represent, in float64."""
        B, T, H, K, V = self.batch, self.tokens, self.heads, self.key_dim, self.value_dim
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator)

        made = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
        made["rate"] = 0.03 * uniform(B, T, H) / self.window
        sizes = [K, *[6] * (self.depth - 1), V]
        for layer in range(self.depth):
            made[f"w{layer}"] = 0.5 * normal(H, sizes[layer], sizes[layer + 1])
            if self.bias:
                made[f"b{layer}"] = 0.1 * normal(H, sizes[layer + 1])
        if self.norm:
            made |= {"scale": 1 + 0.1 * normal(H, V), "shift": 0.1 * normal(H, V)}
        if self.averaged:
            made["tau"] = 1 / torch.arange(1, self.mini_batch + 1) + 0.05 * uniform(self.mini_batch)
        else:
            drawn = {"log_decay": -0.2 * uniform(B, T, H), "log_momentum": -uniform(B, T, H), "step": uniform(B, T, H)}
            drawn["step"] *= 0.05 if self.newton_schulz else 1  # orthogonal matrices are large steps
            made |= {name: drawn[name] for name in self.gates}
        return {name: x.double() for name, x in made.items()}

    def update(self, x: Tensors, where: slice = slice(None), **flags: Tensor | None) -> InnerUpdate:
        network = Network(
            tuple(x[f"w{layer}"] for layer in range(self.depth)),
            tuple(x[f"b{layer}"] for layer in range(self.depth)) if self.bias else None,
            (x["scale"], x["shift"]) if self.norm else None,
            self.residual,
            0.5 if self.averaged else 1.0,
        )
        cut = {name: x[name][:, where] for name in STREAMS if name in x}
        gates = {name: cut.pop(name, None) for name in GATES}
        learner: Averaged | Momentum
        if self.averaged:
            learner = Averaged(x["tau"])
        else:
            learner = Momentum(**gates, window=self.window, newton_schulz=self.newton_schulz)
        return InnerUpdate(**cut, network=network, learner=learner, mini_batch=self.mini_batch, **flags)

    def run(self, tensors: Tensors, form: str, dtype: torch.dtype = torch.float64, **flags: Tensor | None) -> Tensors:
        """Output, final state, and the gradients of everything."""
        leaves = {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}
        o, state = prism.memory(self.update(leaves, **flags), None, form)
        assert o.dtype == dtype
        return pulled_back({"o": o, **state}, leaves)


def pulled_back(outputs: Tensors, leaves: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(9)
    loss = torch.zeros((), dtype=torch.float64)
    for x in outputs.values():
        if x.requires_grad:
            loss = loss + (x.double() * torch.randn(x.shape, generator=generator)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {
        f"d {name}": torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(leaves.items(), gradients, strict=True)
    }
    return {name: x.detach() for name, x in {**outputs, **named}.items()}


def assert_same(label: str, got: Tensors, reference: Tensors, tolerance: float = 1e-10) -> None:
    assert got.keys() == reference.keys()
    largest = max((x.norm().item() for name, x in reference.items() if name.startswith("d ")), default=0.0)
    share = 1e-3 if tolerance < 1e-8 else 3e-2
    for name, x in reference.items():
        if x.dtype.is_floating_point:
            assert_close(f"{label} {name}", got[name], x, tolerance, share * largest if name.startswith("d ") else 1e-9)
        else:
            assert torch.equal(got[name], x), f"{label} {name}"


def by_autograd(p: Problem, x: Tensors) -> Tensor:
    """The definition for one document, sharing nothing with the engine: a loss, and gradient steps by autograd."""
    weights = [x[f"w{i}"].expand(p.batch, -1, -1, -1) for i in range(p.depth)]
    biases = [x[f"b{i}"].expand(p.batch, -1, -1) for i in range(p.depth)] if p.bias else []
    start, current = [*weights, *biases], [*weights, *biases]
    U = [torch.zeros_like(w) for w in start]

    def f(parameters: list[Tensor], inputs: Tensor) -> Tensor:
        z = inputs
        for i in range(p.depth):
            z = torch.einsum(
                "bhk,bhkn->bhn", torch.nn.functional.gelu(z, approximate="tanh") if i else z, parameters[i]
            )
            z = z + parameters[p.depth + i] if p.bias else z
        if p.norm:
            z = torch.nn.functional.layer_norm(z, z.shape[-1:], eps=1e-6) * x["scale"] + x["shift"]
        return z + inputs if p.residual else z

    def times(gate: Tensor, what: list[Tensor]) -> list[Tensor]:
        return [gate.reshape(*gate.shape, *[1] * (w.ndim - gate.ndim)) * w for w in what]

    outputs = []
    for t in range(p.tokens):
        place = t % p.mini_batch
        if place == 0:
            start = current
            U = [torch.zeros_like(w) for w in start] if p.averaged else U
        at = [w.detach().requires_grad_() for w in start]
        loss = torch.zeros(())
        for j in range(max(0, t - p.window + 1), t + 1):
            error = (f(at, x["k"][:, j]) - x["v"][:, j]).square().sum(-1)
            loss = loss + ((0.5 if p.averaged else 1.0) * x["rate"][:, j] * error).sum()
        gradient = torch.autograd.grad(loss, at)
        ones = torch.ones(p.batch, p.heads, dtype=torch.float64)
        if p.averaged:
            U = [u + g for u, g in zip(U, gradient, strict=True)]
            current = [w - x["tau"][place] * u for w, u in zip(start, U, strict=True)]
        else:
            gate = {name: x[name][:, t] for name in p.gates}
            momentum = gate["log_momentum"].exp() if "log_momentum" in gate else 0 * ones
            U = [u + g for u, g in zip(times(momentum, U), gradient, strict=True)]
            steps = [orthogonalize(u, p.newton_schulz) for u in U] if p.newton_schulz else U
            kept = times(gate["log_decay"].exp() if "log_decay" in gate else ones, current)
            current = [w - s for w, s in zip(kept, times(gate.get("step", ones), steps), strict=True)]
        outputs.append(f(current, x["q"][:, t]))
    return torch.stack(outputs, 1).detach()


PROBLEMS = [
    Problem(),
    Problem(depth=1),
    Problem(depth=3, norm=False, bias=False, residual=False, value_dim=7),
    Problem(mini_batch=1),
    Problem(mini_batch=1, depth=1, norm=False, residual=False, value_dim=7),
    Problem(mini_batch=16),
    Problem(averaged=False),
    Problem(averaged=False, gates=("log_decay", "log_momentum")),
    Problem(averaged=False, gates=(), depth=1),
    Problem(averaged=False, mini_batch=1, gates=("log_momentum",)),
    Problem(averaged=False, window=3),
    Problem(averaged=False, window=7, mini_batch=3, gates=("log_decay", "step")),
    Problem(averaged=False, window=3, newton_schulz=2, bias=False),
    Problem(
        averaged=False, window=2, newton_schulz=3, bias=False, gates=("log_momentum",), value_dim=7, residual=False
    ),
    Problem(averaged=False, newton_schulz=1, bias=False, norm=False, gates=("log_decay", "log_momentum")),
    Problem(averaged=False, mini_batch=1, newton_schulz=2, bias=False, gates=("log_decay", "step")),
]
every_problem = pytest.mark.parametrize("p", PROBLEMS, ids=map(str, range(len(PROBLEMS))))


def forms(p: Problem) -> list[str]:
    return ["recurrent", "chunkwise", *(["serial"] if p.averaged and p.mini_batch == 1 else [])]


@every_problem
def test_every_form_is_descent_by_autograd(p: Problem) -> None:
    x = p.tensors()
    expected = by_autograd(p, x)
    for form in forms(p):
        assert_close(form, prism.memory(p.update(x), form=form)[0], expected, 1e-10)


@every_problem
def test_forms_agree_in_values_state_and_gradients(p: Problem) -> None:
    """Chunkwise equals recurrent, and so does serial with one token per mini-batch: padded, packed, in both precisions."""
    p = replace(p, tokens=23)
    x = p.tensors()
    mask = torch.arange(23) < torch.tensor([[19], [10]])
    reset = torch.zeros(2, 23, dtype=torch.bool)
    reset[0, [0, 6, 7, 15]] = reset[1, [3, 21]] = True
    for flags in ({}, {"mask": mask}, {"reset": reset}, {"mask": mask, "reset": reset}):
        reference = p.run(x, "recurrent", **flags)
        for form in forms(p)[1:]:
            assert_same(f"{form} {list(flags)}", p.run(x, form, **flags), reference)
    reference = p.run(x, "recurrent")
    single = {form: p.run(x, form, torch.float32) for form in forms(p)}
    for form, got in single.items():
        # Newton-Schulz has a slope of hundreds where U is nearly zero: no form may lose much more than another.
        if p.newton_schulz:
            got = {name: value for name, value in got.items() if not name.startswith("d ")}
            for name in set(reference) - set(got):
                lost = relative_error(single["recurrent"][name], reference[name], 1e-6)
                assert_close(f"{form} float32 {name}", single[form][name], reference[name], max(1e-5, 10 * lost), 1e-6)
        assert_same(f"{form} float32", got, {name: reference[name] for name in got}, 1e-5)


@given(data=st.data())
@examples(25)
@torch.no_grad()
def test_any_split_is_one_pass(data: st.DataObject) -> None:
    """In random forms, with rows at different places of their mini-batches, padding and documents."""
    p = replace(data.draw(st.sampled_from(PROBLEMS), label="problem"), tokens=20, batch=3)
    x = p.tensors()
    resets = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 19)), max_size=4), label="resets")
    reset = torch.zeros(3, 20, dtype=torch.bool)
    for row, t in resets:
        reset[row, t] = True
    whole, end = prism.memory(p.update(x, reset=reset), form="recurrent")
    parts = data.draw(st.lists(st.tuples(*[st.integers(0, 9)] * 3), max_size=5), label="tokens of each row in a part")
    state, seen, done = None, torch.zeros(3, 1, dtype=torch.long), torch.zeros_like(whole)
    for wanted in [*parts, (20, 20, 20)]:
        lengths = torch.tensor(wanted)[:, None].minimum(20 - seen)
        index = torch.arange(max(1, int(lengths.max()))) + seen
        mask = index < seen + lengths
        index = index.clamp(max=19)
        part = {name: take(value, index) if name in STREAMS else value for name, value in x.items()}
        form = data.draw(st.sampled_from(forms(p)), label="form")
        o, state = prism.memory(p.update(part, mask=mask, reset=reset.gather(1, index)), state, form)
        assert torch.count_nonzero(o[~mask]) == 0
        for row in range(3):
            done[row, index[row][mask[row]]] = o[row][mask[row]]
        seen = seen + lengths
    assert_close("outputs", done, whole, 1e-10)
    assert_same("state", state or {}, end)


def test_checkpointed_segments_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Problem(tokens=21, mini_batch=2)
    kept = p.run(p.tensors(), "chunkwise")
    monkeypatch.setattr(chunkwise, "SEGMENT", 3)
    assert_same("segments of 3", p.run(p.tensors(), "chunkwise"), kept, 1e-12)


def test_first_weights_are_learned_and_documents_return_to_them() -> None:
    p = Problem(tokens=9)
    x = p.tensors()
    got = p.run(x, "chunkwise")
    assert all(got[f"d {name}"].norm() > 1e-6 for name in ("w0", "w1", "b0", "b1", "scale", "shift", "tau"))
    _, old = prism.memory(p.update(x))
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[:, 0] = True
    o, _ = prism.memory(p.update(x, reset=reset), old)
    assert_close("after a reset", o, prism.memory(p.update(x))[0], 1e-12)


def test_a_state_holds_the_partial_mini_batch() -> None:
    p = Problem(tokens=10, mini_batch=4)
    _, state = prism.memory(p.update(p.tensors()))
    assert state["position"].tolist() == [2, 2]
    assert state["gradient.w1"].norm() > 0
    _, state = prism.memory(p.update(p.tensors(), slice(0, 8)))
    assert state["position"].tolist() == [0, 0]
    assert torch.count_nonzero(state["gradient.w1"]) == 0


def test_a_state_does_not_follow_the_parameters() -> None:
    p = Problem(tokens=3, batch=1, averaged=False)
    x = p.tensors()
    _, state = prism.memory(p.update(x))
    before = {name: value.clone() for name, value in state.items()}
    x["w0"] += 1
    assert all(torch.equal(state[name], value) for name, value in before.items())


@given(st.integers(1, 9), st.integers(0, 99))
@examples(10)
def test_layer_norm_and_gelu_slopes_equal_autograd(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z, g = torch.randn(2, 3, size, generator=generator, dtype=torch.float64).unbind()
    z.requires_grad_()
    normal, inverse = normalize(z)
    assert_close("norm", normal, torch.nn.functional.layer_norm(z, (size,), eps=1e-6), 1e-10, 1e-6)
    (expected,) = torch.autograd.grad((torch.nn.functional.layer_norm(z, (size,), eps=1e-6) * g).sum(), z)
    assert_close("norm slope", normalize_backward(g, normal, inverse), expected, 1e-10, 1e-4)
    (expected,) = torch.autograd.grad(gelu(z).sum(), z)
    assert_close("gelu slope", gelu_slope(z), expected, 1e-12)


def test_newton_schulz_moves_singular_values_to_one() -> None:
    x = torch.randn(3, 5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for shape in (x, x.transpose(-1, -2), 1e-3 * x):
        values = torch.linalg.svdvals(orthogonalize(shape, 5))
        assert values.min() > 0.6 and values.max() < 1.3
    zero = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.count_nonzero(orthogonalize(zero, 5)) == 0
    assert torch.autograd.grad(orthogonalize(zero, 5).sum(), zero)[0].isfinite().all()


def test_polynomial_features_are_all_products() -> None:
    x = torch.tensor([2.0, 3.0, 5.0])
    with torch.no_grad():
        phi = Polynomial(3, 3)
        phi.coefficients.copy_(torch.tensor([1.0, 10.0, 100.0]))
        assert phi.size == len(phi(x)) == 3 + 6 + 10
        assert phi(x)[:9].tolist() == [2, 3, 5, 40, 60, 100, 90, 150, 250]
        assert sorted(phi(x)[9:].tolist()) == sorted(
            100.0 * a * b * c for i, a in enumerate(x) for j, b in enumerate(x[i:], i) for c in x[j:]
        )
        assert torch.equal(Polynomial(3, 1)(x), x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 5, 2, 3)}, r"k has shape \[2, 5, 2, 3\], expected \[B, T, H, K\] = \[2, 5, 2, 8\]"),
        ({"rate": torch.zeros(2, 5)}, r"rate must be a floating-point tensor \[B, T, H\]"),
        ({"v": torch.zeros(2, 5, 2, 3)}, r"network.weights\[1\] has shape"),
        ({"mini_batch": 0}, "mini_batch must be an integer ≥ 1, got 0"),
        ({"mini_batch": 3}, r"learner.scale has shape \[4\], expected \[b\] = \[3\]"),
        ({"learner": Momentum(log_decay=torch.ones(2, 5, 2))}, "learner.log_decay must be ≤ 0, got"),
        ({"learner": Momentum(newton_schulz=5)}, "the network must have no biases"),
        ({"learner": Momentum(window=0)}, "learner.window must be an integer ≥ 1, got 0"),
        ({"learner": None}, "learner must be Averaged or Momentum"),
        ({"mask": torch.tensor([[False, True, True, True, True]] * 2)}, "real tokens first"),
        ({"reset": torch.zeros(2, 5)}, "reset must be a bool tensor"),
    ],
)
def test_wrong_updates_are_refused(change: dict[str, Any], message: str) -> None:
    p = Problem(tokens=5)
    with pytest.raises(ValueError, match=message):
        replace(p.update(p.tensors()), **change)


def test_wrong_states_are_refused() -> None:
    p = Problem(tokens=5)
    u = p.update(p.tensors())
    _, state = prism.memory(u)
    with pytest.raises(ValueError, match=r"state must be a dict of the tensors w1, w2, b1, b2, gradient\.w1"):
        prism.memory(u, {"w1": state["w1"]})
    with pytest.raises(ValueError, match=r"state 'w1' has shape \[1, 2, 8, 6\], expected \[2, 2, 8, 6\]"):
        prism.memory(u, {**state, "w1": state["w1"][:1]})
