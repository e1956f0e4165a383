"""The kernels of a decay per key channel against the float64 recurrence, over drawn mixtures of their options.

Shapes are tiny, because Triton's interpreter is slow; chunks have 16 tokens here, so a few tokens are several chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from torch import Tensor

import prism
from prism import rules
from prism.engine import memory
from prism.engine.kernels.memory.channel_configurations import ChannelConfiguration, default
from prism.engine.kernels.memory.configurations import Tiling, forced
from prism.engine.memories.slots import Slots
from prism.engine.memory import chosen, engine_of
from prism.rules.parts import l2_normalize
from prism.rules.rule import Span
from tests.engine.kernels.problems import SMALLEST
from tests.engine.kernels.where import DEVICE, needs_kernels
from tests.helpers import examples

pytestmark = needs_kernels

KEPT = ("log_decay", "erase_strength", "state")
"""Tensors that stay in float32."""


@dataclass(frozen=True)
class Channels:
    """One update, described. `erase` is along the first key, an own one, or two: "write" and "write first"."""

    tokens: int
    writes: int = 1
    heads: int = 2
    groups: int = 2
    erase: str = "first"
    erase_on: str = "decayed"
    read: str = "after"
    decay: float = 0.5
    packed: bool = False
    initial: bool = True
    substeps: int = 1
    per_channel: bool = True
    segments: int = 1
    seed: int = 0

    def leaves(self) -> dict[str, Tensor]:
        T, R, H, G, K, V = self.tokens, self.tokens * self.substeps, self.heads, self.groups, 16, 16
        generator = torch.Generator(DEVICE).manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(1, *shape, generator=generator)

        x = {"q": l2_normalize(draw(T, G, K)), "k": l2_normalize(draw(R, G, self.writes, K))}
        x["w"] = draw(R, H, self.writes, V)
        x["log_decay"] = -self.decay * draw(T, H, *[K] * self.per_channel).sigmoid()
        if self.erase in ("first", "own"):
            x["erase_strength"] = draw(R, H).sigmoid()
        if self.erase not in ("first", "none"):
            x["erase_key"] = 0.9 * l2_normalize(draw(R, G, K))
        if self.erase == "write":
            x["erase_write"] = 0.5 * x["erase_key"] + 0.05 * draw(R, G, K)
        if self.initial:
            x["state"] = draw(H, K, V)
        return x

    def options(self) -> dict[str, Any]:
        more: dict[str, Any] = {"erase_on": self.erase_on, "read": self.read, "substeps": self.substeps}
        more |= {"erase_first": self.erase == "first", "erase_write_first": self.erase == "write first"}
        if self.packed:
            generator = torch.Generator(DEVICE).manual_seed(self.seed)
            more["reset"] = torch.rand(1, self.tokens, generator=generator) < 0.15
            more["mask"] = torch.rand(1, self.tokens, generator=generator) < 0.85
        return more


def compute(case: Channels, x: dict[str, Tensor], form: str, backend: str) -> dict[str, Tensor]:
    """Outputs, final state and all gradients, in float64 on the CPU."""
    given = {name: z.detach().requires_grad_() for name, z in x.items()}
    update = prism.Update(**{n: z for n, z in given.items() if n != "state"}, **case.options())
    o, end = memory(update, given.get("state"), form, backend)
    weight = torch.linspace(-1, 1, o.shape[-1], device=o.device)
    loss = (o.double() * weight).square().sum() + (end.double() * weight).sum()
    gradients = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
    named = {f"d_{n}": torch.zeros_like(x[n]) if g is None else g for n, g in zip(given, gradients, strict=True)}
    return {name: z.detach().double().cpu() for name, z in {"o": o, "end": end, **named}.items()}


def errors(case: Channels, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Relative to the size of each tensor, or to 1: some gradients are zero."""
    x = {name: z if name in KEPT else z.to(dtype) for name, z in case.leaves().items()}
    exact = compute(case, {name: z.double() for name, z in x.items()}, "recurrent", "torch")
    small = Tiling(SMALLEST)
    tiles = ChannelConfiguration(small, small, small, small, chunk=16, key_block=SMALLEST, segments=case.segments)
    with forced(tiles):
        got = compute(case, x, "chunkwise", "triton")
    return {n: ((got[n] - z).norm() / z.norm().clamp(min=1.0)).item() for n, z in exact.items()}


drawn = st.builds(
    Channels,
    tokens=st.integers(1, 20),
    writes=st.integers(1, 2),
    groups=st.integers(1, 2),
    erase=st.sampled_from(["none", "first", "own", "write", "write first"]),
    erase_on=st.sampled_from(["decayed", "undecayed"]),
    read=st.sampled_from(["after", "before"]),
    decay=st.sampled_from([0.0, 0.5, 60.0, 1e4]),
    packed=st.booleans(),
    initial=st.booleans(),
    substeps=st.sampled_from([1, 1, 2]),
    per_channel=st.sampled_from([True, True, False]),
    segments=st.sampled_from([1, 1, 2]),
    seed=st.integers(0, 99),
)


@given(case=drawn)
@example(Channels(20, 2, 2, 1, "own", "undecayed", "before", 0.5, True))
@example(Channels(33, 1, 1, 1, "write", "undecayed", "after", 60.0))
@example(Channels(1, read="before", initial=False))
@examples(5)
def test_everything_agrees_with_the_recurrence(case: Channels) -> None:
    if case.substeps == 2:
        case = replace(case, tokens=-(-case.tokens // 2))
    found = errors(case)
    assert max(found.values()) <= 5e-6, found


@pytest.mark.parametrize("erase", ["first", "write", "none"])
def test_half_precision_errs_by_a_few_roundings(erase: str) -> None:
    """2^-11 is one. `benchmarks/accuracy.py` compares with torch, in longer sequences."""
    found = errors(Channels(20, erase=erase, erase_on="undecayed" if erase == "write" else "decayed"), torch.float16)
    assert max(found.values()) <= 3 * 2**-11, found


def test_the_first_gate_of_an_empty_memory_has_no_gradient() -> None:
    """In half precision. It is a sum over rows minus one over columns, which cancels only if both round in the same way."""
    case = Channels(30, initial=False)
    x = {name: z if name in KEPT else z.half() for name, z in case.leaves().items()}
    gradient = compute(case, x, "chunkwise", "triton")["d_log_decay"]
    assert gradient[:, 0].abs().max() <= 1e-5 * gradient.abs().max()


def test_a_gate_that_forgets_everything_does_not_affect_its_neighbours() -> None:
    case = Channels(30, erase="none", initial=False)
    x = {name: z if name in KEPT else z.half() for name, z in case.leaves().items()}
    x["log_decay"][:, 3, :, ::2] = -1e9
    exact = compute(case, {name: z.double() for name, z in x.items()}, "recurrent", "torch")
    got = compute(case, x, "chunkwise", "triton")
    for name, wanted in exact.items():
        assert (got[name] - wanted).norm() <= 2e-3 * wanted.norm(), name


def test_torch_compile_without_graph_breaks() -> None:
    """Which also runs the operator on fake tensors: their shapes must be the real ones."""
    from prism.engine.kernels.memory.channel_operator import channel_memory

    case = Channels(20, heads=2, groups=1, erase="write first")
    x = {name: z.requires_grad_() for name, z in case.leaves().items()}

    def call(q: Tensor, k: Tensor, w: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return memory(prism.Update(q, k, w, g, erase_key=b, erase_write_first=True), state, "chunkwise", "triton")

    tensors = list(x.values())
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    eager = call(*tensors)
    gradients = [torch.autograd.grad(o.sum() + end.sum(), tensors) for o, end in (compiled, eager)]
    for got, wanted in zip((*compiled, *gradients[0]), (*eager, *gradients[1]), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    inputs = (x["q"], x["k"], x["w"], x["log_decay"], x["erase_key"], None, None, None)
    real = channel_memory(*inputs, 0, True)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = channel_memory(*[None if z is None else mode.from_tensor(z) for z in inputs], 0, True)
    assert [(z.shape, z.dtype) for z in fake] == [(z.shape, z.dtype) for z in real]


def test_wide_memories_have_a_configuration() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        chosen = default(256, 512, dtype)
        assert 256 % chosen.key_block == 0 and 256 % chosen.prepare.block == 0 and 512 % chosen.tokens.block == 0


@pytest.mark.parametrize("name", ["kda", "gla", "rwkv6", "rwkv7", "hgrn2", "gsa"])
def test_rules_with_a_decay_per_channel_run_on_these_kernels(name: str) -> None:
    with torch.no_grad():
        rule = rules.get(name).build(32, 2)
        update, *_ = rule.update(torch.zeros(1, 4, 32), {}, Span())
    while hasattr(update, "update"):  # an update that only wraps another
        update = update.update
    assert chosen(engine_of(type(update)), update, "chunkwise", "triton")[1].backend == "triton"


def test_slots_read_their_values_through_these_kernels() -> None:
    draw = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, write = (torch.randn(1, 18, 1, 16, generator=draw) for _ in range(4))
    decay = -torch.rand(1, 18, 1, 16, generator=draw)

    def results(dtype: torch.dtype, form: str, backend: str) -> list[Tensor]:
        leaves = [z.to(dtype).requires_grad_() for z in (q, k, v, write.sigmoid(), decay)]
        o, state = memory(Slots(*leaves), None, form, backend)
        grads = torch.autograd.grad(o.square().sum() + state["values"].sum(), leaves)
        return [z.detach().double() for z in (o, state["keys"], state["values"], *grads)]

    exact = results(torch.float64, "recurrent", "torch")
    for got, wanted in zip(results(torch.float32, "chunkwise", "triton"), exact, strict=True):
        assert (got - wanted).norm() <= 2e-6 * wanted.norm()
