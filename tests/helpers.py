"""What the tests share: relative errors, random updates of every shape, and one way to run a form with all its gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import settings
from torch import Tensor

import prism

Tensors = dict[str, Tensor]

INPUTS = ("q", "k", "w", "log_decay", "erase_key", "erase_strength", "erase_write")
"""The tensors of an `Update` that have gradients."""


def relative_error(got: Tensor, reference: Tensor, scale: float = 0.0) -> float:
    """‖got - reference‖ / max(‖reference‖, scale), in float64; inf where anything is NaN.

    `scale` is the size below which a tensor counts as zero, so that its error is measured absolutely. With no scale, a
    reference of zero is met by zero only.
    """
    assert got.shape == reference.shape, f"shape {list(got.shape)}, expected {list(reference.shape)}"
    got, reference = got.detach().double().cpu(), reference.detach().double().cpu()
    difference = (got - reference).norm().item()
    if difference == 0.0:
        return 0.0
    size = max(reference.norm().item(), scale)
    error = difference / size if size > 0 else float("inf")
    return error if error == error else float("inf")


def assert_close(name: str, got: Tensor, reference: Tensor, tolerance: float, scale: float = 0.0) -> None:
    """Norm-wise, per tensor. NaN never passes."""
    error = relative_error(got, reference, scale)
    assert error <= tolerance, f"{name}: relative error {error:.3g} exceeds {tolerance:.3g}"


def examples(count: int) -> settings:
    """This many hypothesis examples in an ordinary run; twenty times as many, and new ones, with HYPOTHESIS_PROFILE=search."""
    return settings(max_examples=count * (20 if os.environ.get("HYPOTHESIS_PROFILE") == "search" else 1))


def assert_all_close(
    label: str, got: Tensors, reference: Tensors, tolerance: float, scales: Mapping[str, float]
) -> None:
    assert got.keys() == reference.keys()
    for name in reference:
        assert_close(f"{label} {name}", got[name], reference[name], tolerance, scales.get(name, 0.0))


@dataclass(frozen=True)
class Problem:
    """A random update, described: its sizes, its options and a seed. The printed form is the reproduction."""

    tokens: int
    batch: int = 1
    heads: int = 2
    query_heads: int = 2
    key_heads: int = 2
    erase_heads: int = 2
    key_dim: int = 5
    value_dim: int = 3
    writes: int = 1
    substeps: int = 1
    decay: str = "head"
    rate: str = "weak"
    erase: str = "strength"
    beta: tuple[float, float] = (0.0, 1.0)
    erase_on: str = "decayed"
    read: str = "after"
    alike: bool = False
    mask: str = "none"
    reset: str = "none"
    initial: bool = True
    seed: int = 0

    @property
    def ill_conditioned(self) -> bool:
        """Strong reflections along nearly equal keys: rounding is amplified in any order of computation."""
        return self.alike and self.erase != "none" and self.beta[1] > 1.9

    @property
    def one_direction(self) -> bool:
        """A single key channel: every erase takes all there is, and gradients are small differences of large numbers."""
        return self.key_dim == 1 and self.erase != "none"

    def inputs(self, dtype: torch.dtype = torch.float32) -> Tensors:
        """All tensors, float64, holding numbers that `dtype` can represent (so that every precision starts equal)."""
        B, T, H, K, V, L = self.batch, self.tokens, self.heads, self.key_dim, self.value_dim, self.writes
        rows = T * self.substeps
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        def keys(*shape: int) -> Tensor:
            """Unit vectors; `alike`: any two of a head have a cosine of about .999."""
            x = F.normalize(normal(*shape), dim=-1)
            if self.alike:
                common = F.normalize(normal(B, 1, shape[2], *[1] * (len(shape) - 4), K), dim=-1)
                x = common + 0.001**0.5 * x
            return F.normalize(x, dim=-1)

        tensors = {
            "q": normal(B, T, self.query_heads, K),
            "k": keys(B, rows, self.key_heads, L, K),
            "w": normal(B, rows, H, L, V),
        }
        if self.decay != "none":
            tensors["log_decay"] = -self._rates(uniform, (B, T, H) if self.decay == "head" else (B, T, H, K))
        if self.erase != "none":
            if self.erase == "first":
                pass  # along the first key written
            elif self.erase == "write_first":  # a is the first key; b is near enough to it that nothing blows up
                tensors["erase_key"] = uniform(B, rows, self.key_heads, K) * tensors["k"][:, :, :, 0]
            elif self.seed % 2 and self.erase_heads == self.key_heads:
                tensors["erase_key"] = tensors["k"][:, :, :, 0]  # the delta family's own case
            else:
                tensors["erase_key"] = keys(B, rows, self.erase_heads, K)
            low, high = self.beta
            if self.erase in ("strength", "first"):
                tensors["erase_strength"] = low + (high - low) * uniform(B, rows, H)
            elif (
                self.erase == "write"
            ):  # a ≠ β·b, yet near enough to it that I - a bᵀ does not blow up over hundreds of tokens
                rate = low + (high - low) * uniform(B, rows, self.erase_heads, K)
                noise = F.normalize(normal(B, rows, self.erase_heads, K), dim=-1)
                tensors["erase_write"] = rate * tensors["erase_key"] + 0.05 * noise
        if self.initial:
            tensors["state"] = normal(B, H, K, V)
        tensors["d_output"] = normal(B, T, H, V)
        tensors["d_state"] = normal(B, H, K, V)
        tensors = {name: x.to(dtype).double() for name, x in tensors.items()}

        if self.mask != "none":
            index = torch.arange(T).expand(B, T)
            real = torch.randint(0, T + 1, (B, 1), generator=generator)
            tensors["mask"] = {
                "right": index < real,
                "left": index >= T - real,
                "holes": uniform(B, T) < 0.7,
            }[self.mask]
        if self.reset != "none":
            tensors["reset"] = uniform(B, T) < min(0.5, 4 / T)
            if self.reset == "first":
                tensors["reset"][:, 0] = True
        return tensors

    def _rates(self, uniform: Any, shape: tuple[int, ...]) -> Tensor:
        kinds = torch.stack(
            [
                torch.zeros(shape, dtype=torch.float64),
                0.1 * uniform(*shape),
                5 * uniform(*shape),
                50 + 0 * uniform(*shape),
            ]
        )
        names = ("zero", "weak", "strong", "extreme")
        if self.rate in names:
            return kinds[names.index(self.rate)]
        return kinds.gather(0, (4 * uniform(*shape)).long().unsqueeze(0)).squeeze(0)  # "mixed"

    def update(self, tensors: Mapping[str, Tensor]) -> prism.Update:
        named = {name: tensors.get(name) for name in (*INPUTS, "reset", "mask")}
        return prism.Update(
            **named,
            erase_first=self.erase == "first",
            erase_write_first=self.erase == "write_first",
            erase_on=self.erase_on,
            read=self.read,
            substeps=self.substeps,
        )

    def run(self, tensors: Tensors, form: str, dtype: torch.dtype = torch.float64) -> Tensors:
        """Output, final state, and the gradient of everything that has one."""

        def compute(leaves: Tensors) -> tuple[Tensor, Tensor]:
            return prism.memory(self.update(leaves), leaves.get("state"), form)

        return differentiate(compute, tensors, dtype)


def differentiate(compute: Callable[[Tensors], tuple[Tensor, Tensor]], tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Run `compute` in `dtype` and pull `d_output` and `d_state` back to every tensor that has a gradient."""
    kept = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype  # a memory is never half precision
    leaves = {name: tensors[name].to(dtype).requires_grad_() for name in INPUTS if name in tensors}
    if "state" in tensors:
        leaves["state"] = tensors["state"].to(kept).requires_grad_()
    flags = {name: tensors[name] for name in ("mask", "reset") if name in tensors}
    o, state = compute({**leaves, **flags})
    assert o.dtype == dtype
    assert state.dtype == kept
    loss = (o * tensors["d_output"].to(dtype)).sum(dtype=kept) + (state * tensors["d_state"].to(kept)).sum()
    gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if loss.requires_grad:  # not if all is masked and there is no initial state: nothing depends on anything then
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {
        f"d_{name}": torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }
    return {"o": o.detach(), "final": state.detach(), **named}


def scales(reference: Tensors, dtype: torch.dtype = torch.float64) -> dict[str, float]:
    """Below which size a tensor of `run` counts as zero: a small share of the largest value, or of the largest gradient.

    Single precision rounds each of the numbers that cancel to such a zero, so its share is larger.
    """
    share = 1e-3 if dtype == torch.float64 else 3e-2
    values = max(reference[name].norm().item() for name in ("o", "final"))
    gradients = max(x.norm().item() for name, x in reference.items() if name.startswith("d_"))
    return {name: share * (gradients if name.startswith("d_") else values) for name in reference}


def float32_tolerances(problem: Problem, inputs: Tensors, reference: Tensors) -> dict[str, float]:
    """1e-5; where rounding is amplified in any order of computation, ten times what the recurrence itself loses."""
    if not problem.ill_conditioned:
        return dict.fromkeys(reference, 1e-5)
    own, size = problem.run(inputs, "recurrent", torch.float32), scales(reference, torch.float32)
    return {name: max(1e-5, 10 * relative_error(own[name], x, size[name])) for name, x in reference.items()}


LENGTHS = st.one_of(st.sampled_from([1, 2, 63, 64, 65, 257]), st.integers(1, 140))


@st.composite
def problems(draw: st.DrawFn, tokens: st.SearchStrategy[int] = LENGTHS, **fixed: Any) -> Problem:
    """Every kind of update the normal form has. `fixed` pins fields."""
    heads = draw(st.sampled_from([1, 2, 4]))
    divisors = st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])
    erase = draw(st.sampled_from(["none", "strength", "first", "write", "write_first"]))
    erase_on = draw(st.sampled_from(["decayed", "undecayed"])) if erase != "none" else "decayed"
    # β beyond 1 turns the looked-up part around. That is a contraction only where a = β·b meets the decayed state.
    turning = erase in ("strength", "first") and erase_on == "decayed"
    problem = Problem(
        tokens=draw(tokens),
        batch=draw(st.integers(1, 3)),
        heads=heads,
        query_heads=draw(divisors),
        key_heads=draw(divisors),
        erase_heads=draw(divisors),
        key_dim=draw(st.sampled_from([1, 3, 5, 8])),
        value_dim=draw(st.sampled_from([1, 2, 4, 7])),
        writes=draw(st.integers(1, 4)),
        substeps=draw(st.sampled_from([1, 1, 2, 3])),
        decay=draw(st.sampled_from(["none", "head", "channel"])),
        rate=draw(st.sampled_from(["zero", "weak", "strong", "extreme", "mixed"])),
        erase=erase,
        beta=draw(st.sampled_from([(0.0, 1.0), (0.0, 2.0)])) if turning else (0.0, 1.0),
        erase_on=erase_on,
        read=draw(st.sampled_from(["after", "before"])),
        alike=draw(st.booleans()),
        mask=draw(st.sampled_from(["none", "none", "left", "right", "holes"])),
        reset=draw(st.sampled_from(["none", "none", "random", "first"])),
        initial=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )
    return replace(problem, **fixed)


def definition(update: prism.Update, state: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """The normal form once more, as plain loops over batch, token, head, sub-step and write, in numpy."""

    def array(x: Tensor | None) -> Any:
        return None if x is None else x.detach().cpu().numpy()

    q, k, w, g = array(update.q), array(update.k), array(update.w), array(update.log_decay)
    b, beta, a = array(update.erase_key), array(update.erase_strength), array(update.erase_write)
    reset, mask, n = array(update.reset), array(update.mask), update.substeps
    B, T, _, K = q.shape
    H, L, V = w.shape[2:]

    def group(x: np.ndarray, h: int) -> int:
        return h // (H // x.shape[2])

    outputs = np.zeros((B, T, H, V))
    finals = np.zeros((B, H, K, V)) if state is None else np.array(array(state), copy=True)
    for i in range(B):
        for h in range(H):
            S = finals[i, h]
            for t in range(T):
                if mask is not None and not mask[i, t]:
                    continue
                if reset is not None and reset[i, t]:
                    S = np.zeros((K, V))
                query = q[i, t, group(q, h)]
                if update.read == "before":
                    outputs[i, t, h] = S.T @ query
                for j in range(t * n, t * n + n):
                    # The decay belongs to the token's first sub-step; a scalar decay is a constant diagonal.
                    decayed = S if g is None or j > t * n else np.diag(np.exp(g[i, t, h]) * np.ones(K)) @ S
                    new = decayed
                    if b is not None:
                        looked_up = b[i, j, group(b, h)]
                        erase = beta[i, j, h] * looked_up if a is None else a[i, j, group(a, h)]
                        seen = decayed if update.erase_on == "decayed" else S
                        new = decayed - np.outer(erase, looked_up @ seen)
                    for l in range(L):
                        new = new + np.outer(k[i, j, group(k, h), l], w[i, j, h, l])
                    S = new
                if update.read == "after":
                    outputs[i, t, h] = S.T @ query
            finals[i, h] = S
    return outputs, finals


@contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # which also fills what `empty` returns
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
