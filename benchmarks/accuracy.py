"""Check the kernels' accuracy: every output and gradient against float64, compared with the same computation in torch.

The reference is the error of torch with the same input dtype: the chunk form with every matrix product in that dtype (float32
sums inside a product, a float32 state between chunks), differentiated by autograd. A kernel may err at most twice as much, in
the norm. Every case draws its own inputs, and unwritten memory is NaN.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prism
from low_precision import low_precision
from prism.engine import layer_ops
from prism.engine.inputs import repeat_heads, repeat_mask
from prism.engine.kernels.memory.configurations import Configuration, forced
from prism.engine.update import at_substep

Tensors = dict[str, Tensor]

FLOOR = 2e-6
"""Relative errors below this are allowed in any case: float32 sums in another order."""
RECURRENT_UP_TO = 2048
"""Longer sequences are compared with the float64 chunk form, which `reference` compares with the recurrence."""
EXACT = 1e-10
"""The largest relative error of that form."""


@dataclass(frozen=True)
class Case:
    """Sizes and kind of one memory. Inputs are drawn from a hash of its fields: a renamed field draws other numbers."""

    tokens: int
    writes: int = 2
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    decay: str = "weak"  # "none", "weak", "strong", or "shut": weak, and now and then a gate of -10⁶
    erase: str = "first"  # along the first key; "own": along a separate key; or "none"
    alike: bool = False  # correlated keys, at a cosine of about .999
    packed: bool = False  # several documents and padding
    segments: int | None = None
    batch: int = 1
    heads: int = 2
    groups: int | None = None  # heads of q and k; None: as many as the values have
    substeps: int = 1  # rows of a token, each of which erases and writes

    @property
    def key(self) -> str:
        """What the inputs are drawn from. Fields that were added later count only where they are used."""
        return repr(self).replace(", groups=None", "").replace(", substeps=1)", ")")


def cases() -> Iterator[Case]:
    """All cases, ordered so that neighbours share compiled kernels."""
    for tokens in (1, 63, 64, 65, 1000, 65536):
        yield Case(tokens)
    for variation in ({"alike": True}, {"decay": "strong"}, {"decay": "shut"}, {"segments": 3}):
        yield Case(1500, **variation)
    for variation in ({"decay": "strong"}, {"decay": "shut"}, {"packed": True}, {"erase": "own"}):
        yield Case(4000, segments=3, **variation)
    for writes in (1, 3, 4):
        yield Case(333, writes)
        yield Case(333, writes, alike=True)
    # Under a strong decay few tokens determine a gate's gradient: many short sequences, whose errors share one norm.
    for tokens, batch in ((1, 64), (20, 16), (130, 8)):
        for dtype in ("bfloat16", "float16"):
            yield Case(tokens, dtype=dtype, decay="strong", batch=batch)
    yield Case(333, decay="none")
    yield Case(333, packed=True)
    yield Case(333, erase="own")
    yield Case(333, 4, erase="own")  # five columns
    yield Case(333, 1, erase="none")
    for key_dim, value_dim in ((64, 64), (32, 32), (256, 256), (64, 256), (20, 36), (16, 16), (128, 32), (64, 24)):
        yield Case(333, key_dim=key_dim, value_dim=value_dim)
    for heads, groups in ((4, 2), (6, 2), (4, 1)):  # values with more heads than queries and keys
        yield Case(333, heads=heads, groups=groups)
    yield Case(333, heads=4, groups=2, packed=True, erase="own")
    yield Case(150, 1, dtype="float32", heads=4, groups=2)
    for substeps in (2, 3, 4):
        yield Case(333, 1, substeps=substeps)
    yield Case(333, 2, substeps=2, packed=True, heads=4, groups=2)
    yield Case(3000, 1, substeps=2, segments=3)
    yield Case(150, 1, 64, 64, "float16", substeps=2, alike=True)
    for writes in (6, 8):
        yield Case(333, writes)
        yield Case(150, writes, 64, 64, "float16", erase="own")
    yield Case(20000, key_dim=256, heads=1)  # few heads and a long sequence, too wide for segments
    yield Case(333, 4, 64, 64)
    yield Case(333, 4, 256, 256)
    yield Case(333, 1, 256, 512)
    yield Case(333, key_dim=64, value_dim=64, dtype="float16", alike=True)
    yield Case(333, key_dim=64, value_dim=64, dtype="float32", alike=True)
    yield Case(333, 1, dtype="float32", decay="strong")


def check(case: Case, device: str, configuration: Configuration | None = None, seed: int = 0) -> dict[str, Any]:
    """Errors by tensor, `{name: {"kernel": …, "torch": …}}`, and whether every one is within the bound."""
    tensors, flags = draw(case, device, seed)
    long = case.tokens > RECURRENT_UP_TO
    exact = differentiate(case, _in_torch("chunkwise" if long else "recurrent"), tensors, flags, torch.float64)
    dtype = getattr(torch, case.dtype)
    plain = _in_half_precision if dtype in (torch.bfloat16, torch.float16) else _in_torch("chunkwise")
    theirs = differentiate(case, plain, tensors, flags, dtype)
    chosen = configuration
    if case.segments is not None:
        chosen = replace(configuration or _default(case, dtype, device), segments=case.segments)
    with unwritten_memory_is_nan(), nullcontext() if chosen is None else forced(chosen):
        ours = differentiate(case, _kernel, tensors, flags, dtype)
    errors = {}
    for name, reference in exact.items():
        errors[name] = {"kernel": error(ours[name], reference), "torch": error(theirs[name], reference)}
    good = all(e["kernel"] <= max(2 * e["torch"], FLOOR) for e in errors.values())
    return {"case": asdict(case), "errors": errors, "good": good}


def reference(device: str) -> dict[str, Any]:
    """The chunk form in float64, the reference of long sequences, against the recurrence."""
    case = Case(RECURRENT_UP_TO, 2, 64, 64, "float64", packed=True)
    tensors, flags = draw(case, device, 0)
    exact, chunks = (
        differentiate(case, _in_torch(form), tensors, flags, torch.float64) for form in ("recurrent", "chunkwise")
    )
    errors = {name: {"kernel": error(chunks[name], z), "torch": EXACT} for name, z in exact.items()}
    good = all(e["kernel"] <= EXACT for e in errors.values())
    return {"case": {"what": "float64 chunks, recurrence", "dtype": "float64"}, "errors": errors, "good": good}


@contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # `empty` is then filled with NaN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def draw(case: Case, device: str, seed: int) -> tuple[Tensors, Tensors]:
    """Leaves, already rounded to the case's dtype, and the masks. Each case has different numbers."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"({seed}, {case.key})".encode()))
    B, T, H, L, K, V = case.batch, case.tokens, case.heads, case.writes, case.key_dim, case.value_dim
    G, R = case.groups or H, T * case.substeps

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    keys = normal(B, R, G, L, K)
    if case.alike:
        keys = normal(B, 1, G, 1, K) + 0.03 * keys
    tensors = {"q": F.normalize(normal(B, T, G, K), dim=-1), "k": F.normalize(keys, dim=-1), "w": normal(B, R, H, L, V)}
    if case.erase == "own":
        tensors["erase_key"] = F.normalize(normal(B, R, G, K), dim=-1)
    dtype = getattr(torch, case.dtype)
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    if case.decay != "none":
        gates = -uniform(B, T, H) * (20.0 if case.decay == "strong" else 0.05)
        shut = uniform(B, T, H) < 0.05 if case.decay == "shut" else torch.zeros_like(gates, dtype=torch.bool)
        tensors["log_decay"] = gates.masked_fill(shut, -1e6)
    if case.erase != "none":
        tensors["erase_strength"] = uniform(B, R, H)
    tensors["state"] = normal(B, H, K, V)
    tensors["d_output"] = normal(B, T, H, V).to(dtype)
    tensors["d_state"] = normal(B, H, K, V)
    flags = {}
    if case.packed:
        flags = {"reset": uniform(B, T) < 0.02, "mask": uniform(B, T) < 0.9}
    return tensors, flags


def differentiate(
    case: Case, compute: Callable[..., tuple[Tensor, Tensor]], tensors: Tensors, flags: Tensors, dtype: torch.dtype
) -> Tensors:
    """Outputs, final state and every gradient. Gates and states are float32 even with half-precision tensors."""
    kept = torch.float64 if dtype == torch.float64 else torch.float32

    def cast(name: str, x: Tensor) -> Tensor:
        return x.to(kept if name in ("log_decay", "erase_strength", "state", "d_state") else dtype)

    leaves = {name: cast(name, x).requires_grad_() for name, x in tensors.items() if not name.startswith("d_")}
    fields = {name: x for name, x in leaves.items() if name != "state"}
    update = prism.Update(**fields, **flags, erase_first=case.erase == "first", substeps=case.substeps)
    o, state = compute(update, leaves["state"])
    given = [cast(name, tensors[name]) for name in ("d_output", "d_state")]
    gradients = torch.autograd.grad([o, state], list(leaves.values()), given)
    named = {f"d_{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {"o": o.detach(), "state": state.detach(), **named}


def _kernel(update: prism.Update, state: Tensor) -> tuple[Tensor, Tensor]:
    return prism.memory(update, state, "chunkwise", "triton")


def _in_half_precision(u: prism.Update, state: Tensor) -> tuple[Tensor, Tensor]:
    """`low_precision`, which has one row per token and no groups."""
    n, H = u.substeps, u.heads

    def every(z: Tensor | None, position: int | None = None) -> Tensor | None:
        z = z if z is None or z.ndim < 4 else repeat_heads(z, H)
        return z if z is None or position is None else at_substep(z, n, position)

    q, k, b = every(u.q, n - 1), every(u.k), every(u.erase_key)
    assert q is not None and k is not None
    flags = {"reset": every(u.reset, 0), "mask": repeat_mask(u.mask, n)}
    o, end = low_precision(prism.Update(q, k, u.w, every(u.log_decay, 0), b, u.erase_strength, **flags), state)
    return o[:, n - 1 :: n], end


def _in_torch(form: str) -> Callable[[prism.Update, Tensor], tuple[Tensor, Tensor]]:
    return lambda update, state: prism.memory(update, state, form, "torch")


def _default(case: Case, dtype: torch.dtype, device: str) -> Configuration:
    from prism.engine.kernels.memory.configurations import configuration

    columns = case.writes + (case.erase == "own")
    return configuration(case.key_dim, case.value_dim, columns, dtype, torch.device(device))


def around_the_memory(device: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Check the kernels of the operations around the memory (prism.engine.layer_ops) in the same way."""
    from prism.engine.kernels.ops import columns, short_conv, solver
    from prism.engine.layer_ops import UNIT_EPS, Corrections, delta_columns, solve

    B, T, H, L, K, V = 2, 333, 2, 3, 128, 128
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    anchored = [normal(B, T, H, V), normal(B, T, H, L, V), normal(B, T, H, L).sigmoid(), normal(L, H, V)]
    for name in ("gelu", "closed"):

        def plain(v: Tensor, u: Tensor, p: Tensor, beta: Tensor, scale: Tensor, name: str = name) -> Tensor:
            return scale.movedim(0, 1) * (beta.unsqueeze(-1) * solve(v - u, p, L, name))

        def kernel(*tensors: Tensor, name: str = name) -> Tensor:
            return solver.solve(*tensors, name == "gelu", True)

        yield _compare(f"solver {name}", kernel, plain, [normal(B, T, H, V), *anchored])

    yield _compare(
        "solver gelu, no gains",
        lambda v, u, beta, scale: solver.solve(v, u, None, beta, scale, True, True),
        lambda v, u, beta, scale: scale.movedim(0, 1) * (beta.unsqueeze(-1) * solve(v - u, None, L, "gelu")),
        [normal(B, T, H, V), anchored[0], *anchored[2:]],
    )

    def flat(*parts: Tensor) -> Tensor:
        return torch.cat([z.flatten(2) for z in parts], -1)

    def in_torch(mixed: Tensor, beta: Tensor, keys: Tensor, *rest: Tensor) -> Tensor:
        with _no_kernels():
            return flat(*delta_columns(mixed, beta, K, corrections=Corrections(keys, *rest, "closed", True)))

    def by_kernel(*tensors: Tensor) -> Tensor:
        return flat(*columns.columns(*tensors, K, K**-0.5, UNIT_EPS, False, True))

    rows = [normal(B, T, H * (2 * K + V)), normal(B, T, H).sigmoid(), normal(B, T, H, L, K)]
    yield _compare("columns", by_kernel, in_torch, [*rows, *anchored])

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = torch.zeros_like(x) + bias
        for back in range(len(weight)):
            y = y + F.pad(x, (0, 0, back, 0))[:, : x.shape[1]] * weight[-1 - back]
        return F.silu(y)

    yield _compare(
        "short convolution",
        lambda x, weight, bias: short_conv.short_conv(x, weight, bias, None, None, True),
        convolve,
        [normal(B, T, 256), normal(4, 256), normal(256)],
    )


@contextmanager
def _no_kernels() -> Iterator[None]:
    """Compute the operations of `prism.engine.layer_ops` in torch."""
    chosen, layer_ops.use_kernel = layer_ops.use_kernel, lambda x: False
    try:
        yield
    finally:
        layer_ops.use_kernel = chosen


def _compare(
    name: str, kernel: Callable[..., Tensor], plain: Callable[..., Tensor], leaves: list[Tensor]
) -> dict[str, Any]:
    """Errors of a kernel and of its torch definition, output and gradients, both against float64."""
    d_y = torch.randn_like(plain(*leaves))

    def everything(compute: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        given = [z.detach().to(dtype).requires_grad_() for z in leaves]
        y = compute(*given)
        return [y.detach(), *torch.autograd.grad(y, given, d_y.to(dtype))]

    exact, theirs = (everything(plain, dtype) for dtype in (torch.float64, d_y.dtype))
    with unwritten_memory_is_nan():
        ours = everything(kernel, d_y.dtype)
    errors = {
        "y" if i == 0 else f"d_{i}": {"kernel": error(ours[i], z), "torch": error(theirs[i], z)}
        for i, z in enumerate(exact)
    }
    good = all(e["kernel"] <= max(2 * e["torch"], FLOOR) for e in errors.values())
    return {"case": {"what": name, "dtype": str(d_y.dtype).removeprefix("torch.")}, "errors": errors, "good": good}
