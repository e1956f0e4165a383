"""Check the kernels of a decay per key channel as accuracy.py checks those of a decay per head, by the same bound."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import prism
from accuracy import FLOOR, Tensors, error, unwritten_memory_is_nan
from prism.engine.kernels.memory.channel_configurations import ChannelConfiguration, channel_configuration
from prism.engine.kernels.memory.configurations import forced

KEPT = ("log_decay", "erase_strength", "state", "d_state")
"""Float32 even with half-precision tensors."""


@dataclass(frozen=True)
class ChannelCase:
    """Sizes and kind of one memory. Inputs are drawn from a hash of its fields."""

    tokens: int
    writes: int = 1
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    decay: float = 0.1  # log-decays are drawn between 0 and minus this
    per_channel: bool = True
    erase: str = (
        "first"  # "own": another key with β; "write": another key, and a ≠ β·b; "write first": a is the key; "none"
    )
    erase_on: str = "decayed"
    read: str = "after"
    alike: bool = False
    packed: bool = False
    groups: int = 2  # heads of q, k and the erase
    segments: int | None = None
    batch: int = 1
    heads: int = 2

    @property
    def what(self) -> str:
        """What differs from the defaults, in words."""
        sizes = ("tokens", "writes", "key_dim", "value_dim", "dtype")
        plain = ChannelCase(self.tokens)
        return ", ".join(
            f"{name} {value}"
            for name, value in asdict(self).items()
            if name not in sizes and value != getattr(plain, name)
        )


def cases() -> Iterator[ChannelCase]:
    """All cases, ordered so that neighbours share compiled kernels."""
    for tokens in (1, 31, 32, 33, 1000):
        yield ChannelCase(tokens)
    yield ChannelCase(333, alike=True)
    yield ChannelCase(333, segments=3)
    for dtype in ("bfloat16", "float16"):
        for tokens, batch in ((1, 64), (20, 16), (130, 8)):
            yield ChannelCase(tokens, dtype=dtype, decay=50.0, batch=batch)
    yield ChannelCase(333, packed=True, groups=1)
    yield ChannelCase(333, erase="write first")
    yield ChannelCase(333, erase="none")
    yield ChannelCase(333, erase="none", read="before")
    yield ChannelCase(333, erase="write", erase_on="undecayed")
    yield ChannelCase(130, erase="write", erase_on="undecayed", decay=50.0, batch=8)
    yield ChannelCase(333, 2, erase="own", erase_on="undecayed", read="before", packed=True)
    yield ChannelCase(333, erase_on="undecayed", per_channel=False)
    yield ChannelCase(333, 4)
    yield ChannelCase(333, heads=4)
    for key_dim, value_dim in ((64, 64), (32, 32), (256, 256), (64, 256), (20, 36)):
        yield ChannelCase(333, key_dim=key_dim, value_dim=value_dim)
    yield ChannelCase(150, key_dim=64, value_dim=64, dtype="float32")
    yield ChannelCase(150, dtype="float32", decay=50.0, erase="write", erase_on="undecayed")


def check(
    case: ChannelCase, device: str, configuration: ChannelConfiguration | None = None, seed: int = 0
) -> dict[str, Any]:
    """Errors by tensor, `{name: {"kernel": …, "torch": …}}`, and whether every one is within the bound."""
    tensors, flags = draw(case, device, seed)
    dtype = getattr(torch, case.dtype)
    exact = _differentiate(case, tensors, flags, torch.float64, "recurrent")
    theirs = _differentiate(case, tensors, flags, dtype, "half" if dtype != torch.float32 else "chunkwise")
    chosen = configuration
    if case.segments is not None:
        sizes = (case.key_dim, case.value_dim, case.writes)
        chosen = replace(
            configuration or channel_configuration(*sizes, dtype, torch.device(device)), segments=case.segments
        )
    with unwritten_memory_is_nan(), nullcontext() if chosen is None else forced(chosen):
        ours = _differentiate(case, tensors, flags, dtype, "kernel")
    errors = {n: {"kernel": error(ours[n], z), "torch": error(theirs[n], z)} for n, z in exact.items()}
    good = all(e["kernel"] <= max(2 * e["torch"], FLOOR) for e in errors.values())
    return {"case": asdict(case), "errors": errors, "good": good}


def draw(case: ChannelCase, device: str, seed: int) -> tuple[Tensors, Tensors]:
    """Leaves, already rounded to the case's dtype, and the masks."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(repr((seed, case)).encode()))
    B, T, H, G, L, K = case.batch, case.tokens, case.heads, case.groups, case.writes, case.key_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    keys = normal(B, T, G, L, K)
    if case.alike:
        keys = normal(B, 1, G, 1, K) + 0.03 * keys
    tensors = {"q": F.normalize(normal(B, T, G, K), dim=-1), "k": F.normalize(keys, dim=-1)}
    tensors["w"] = normal(B, T, H, L, case.value_dim)
    if case.erase not in ("first", "none"):
        tensors["erase_key"] = F.normalize(normal(B, T, G, K), dim=-1)
    if case.erase == "write":
        tensors["erase_write"] = uniform(B, T, G, 1) * tensors["erase_key"] + 0.005 * normal(B, T, G, K)
    dtype = getattr(torch, case.dtype)
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    tensors["log_decay"] = -case.decay * uniform(B, T, H, *[K] * case.per_channel)
    if case.erase in ("first", "own"):
        tensors["erase_strength"] = uniform(B, T, H)
    tensors["state"] = normal(B, H, K, case.value_dim)
    tensors["d_output"] = normal(B, T, H, case.value_dim).to(dtype)
    tensors["d_state"] = normal(B, H, K, case.value_dim)
    flags = {"reset": uniform(B, T) < 0.02, "mask": uniform(B, T) < 0.9} if case.packed else {}
    return tensors, flags


def _differentiate(case: ChannelCase, tensors: Tensors, flags: Tensors, dtype: torch.dtype, how: str) -> Tensors:
    """Outputs, final state and every gradient."""
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    given = {name: x.to(kept if name in KEPT else dtype) for name, x in tensors.items()}
    leaves = {name: x.requires_grad_() for name, x in given.items() if not name.startswith("d_")}
    options: dict[str, Any] = {"erase_on": case.erase_on, "read": case.read}
    options |= {"erase_first": case.erase == "first", "erase_write_first": case.erase == "write first"}
    update = prism.Update(**{n: x for n, x in leaves.items() if n != "state"}, **flags, **options)
    if how == "half":
        o, state = low_precision(update, leaves["state"])
    elif how == "kernel":
        o, state = prism.memory(update, leaves["state"], "chunkwise", "triton")
    else:
        o, state = prism.memory(update, leaves["state"], how, "torch")
    gradients = torch.autograd.grad([o, state], list(leaves.values()), [given["d_output"], given["d_state"]])
    named = {f"d_{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {"o": o.detach(), "state": state.detach(), **named}


def low_precision(u: prism.Update, S: Tensor, size: int = 32) -> tuple[Tensor, Tensor]:
    """The chunk form by halving, in torch: matrix products in w's dtype, the rest in float32."""
    dtype, H = u.w.dtype, u.heads
    reset = torch.zeros(u.batch, u.tokens, dtype=torch.bool, device=S.device) if u.reset is None else u.reset
    mask = torch.ones_like(reset) if u.mask is None else u.mask
    reset = reset & mask

    def product(x: Tensor, y: Tensor) -> Tensor:
        return (x.to(dtype) @ y.to(dtype)).float()

    outputs = []
    for start in range(0, u.tokens, size):
        real = mask[:, start : start + size]

        def rows(x: Tensor | None, start: int = start, real: Tensor = real) -> Any:  # [B, H, C, ...], padding as zeros
            if x is None:
                return None
            x = torch.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x[:, start : start + size], 0.0)
            return x.float().repeat_interleave(H // x.shape[2], 2).transpose(1, 2)

        q, b, a, beta, g = map(rows, (u.q, u.erase_key, u.erase_write, u.erase_strength, u.log_decay))
        k, w = rows(u.k).unbind(3), rows(u.w).unbind(3)
        g = g if g.ndim == 4 else g.unsqueeze(-1).expand_as(q)
        G = g.clamp(min=-128).cumsum(2)
        E = F.pad(G, (0, 0, 1, 0))[:, :, :-1]
        document = reset[:, start : start + size].cumsum(1).unsqueeze(1)
        same = document.unsqueeze(-1) == document.unsqueeze(-2)
        first, last = (document == 0).unsqueeze(-1), document[..., -1:]
        to_end = (G[:, :, -1:] - G).exp() * (document == last).unsqueeze(-1)
        read = E if u.read == "before" else G
        look = E if u.erase_on == "undecayed" else G
        incoming, i = S, torch.arange(G.shape[2], device=S.device)

        def gram(
            x: Tensor, R: Tensor, y: Tensor, own: bool, G: Tensor = G, i: Tensor = i, same: Tensor = same
        ) -> Tensor:
            total = torch.diag_embed((x * y).sum(-1)) if own else torch.zeros_like(G[..., :1] * same)
            h = 1
            while h < len(i):
                middle = ((i | (2 * h - 1)) - h).clamp(max=len(i) - 1)
                late = (i & h != 0)[:, None]
                left = torch.where(late, R - G[:, :, middle], -torch.inf).exp()
                right = torch.where(late, -torch.inf, G[:, :, middle] - G).exp()
                corner = i[:, None] // (2 * h) == i[None, :] // (2 * h)
                total = total + torch.where(corner, product(x * left, (y * right).mT), 0.0)
                h *= 2
            return torch.where(same, total, 0.0)

        o = product(q * read.exp() * first, incoming)
        for key, value in zip(k, w, strict=True):
            o = o + product(gram(q, read, key, u.read == "after"), value)
        S = S * (G[:, :, -1].exp() * (last == 0)).unsqueeze(-1)
        for key, value in zip(k, w, strict=True):
            S = S + product((key * to_end).mT, value)
        if b is not None:
            a = beta.unsqueeze(-1) * b if a is None else a
            seen = product(b * look.exp() * first, incoming)
            for key, value in zip(k, w, strict=True):
                seen = seen + product(gram(b, look, key, False), value)
            lower = gram(b, look, a, False).to(dtype).float()
            seen = torch.linalg.solve_triangular(lower, seen, upper=False, unitriangular=True)
            o = o - product(gram(q, read, a, u.read == "after"), seen)
            S = S - product((a * to_end).mT, seen)
        outputs.append(o.to(dtype))
    return torch.cat(outputs, 2).transpose(1, 2), S
