"""Linear maps and MLPs of many tokens on a CPU, from the weights of their modules.

Maps: torch computes them by MKL. With two threads of an AMD EPYC, oneDNN was faster by about a sixth, and by more where
another process held a core. A convolution with one tap is the way to it.

Several maps of the same tokens: weights are stacked, so that products are wider, and the gradients of the tokens are added
inside the products instead of one after the other.

MLPs, down(silu(gate(x)) ⊙ up(x)): autograd keeps four tensors of the inner width and makes four more in the backward pass.
This keeps two, side by side, and the rest lives for one span of tokens. Experts (experts.py) are such MLPs.

LoRA, quantisation, offloading and hooks change what a module's call does. Where one of them may be at work, it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import mkldnn as _mkldnn

from prism.engine import compat
from prism.hf.norms import traced

FEW = 256
"""Fewer tokens stay with torch: preparing the weights for oneDNN costs more than it gains."""
_SPAN = 2**21
"""Numbers of the inner width in a span. Measured: shorter ones fit the cache, but slow the products down by more."""

Forward = Callable[..., Tensor]


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """What `module(x)` computes, x `[…, K]`. A module that is more than a linear map without a bias is called."""
    if not serves(x) or not is_linear(module):
        found: Tensor = module(x)
        return found
    weight: Any = module.weight
    if not torch.is_grad_enabled():
        return times(x, weight)
    return _Linear.apply(x, weight)


def serves(x: Tensor) -> bool:
    """Whether x `[…, K]` has enough tokens, and may be computed on this way."""
    return x.numel() >= FEW * x.shape[-1] and x.is_contiguous() and untouched(x)


def times(x: Tensor, weight: Tensor) -> Tensor:
    """x `[…, K]` times the transpose of `weight` `[N, K]`."""
    if not _by_convolution():
        return x @ weight.t()
    y = F.conv2d(_image(x), weight[:, :, None, None])
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))


def gradients(d_y: Tensor, x: Tensor, weight: Tensor, to_x: bool, to_weight: bool) -> tuple[Any, Any]:
    """Of x `[…, K]` and of the weight `[N, K]` in `times`, those that are wanted, from that of its outputs `[…, N]`."""
    if torch.is_grad_enabled() or not _by_convolution() or not (to_x or to_weight):
        d_x = d_y @ weight if to_x else None
        return d_x, d_y.flatten(0, -2).t() @ x.flatten(0, -2) if to_weight else None
    given = _image(d_y), _image(x), weight[:, :, None, None], None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    d_rows, d_weight, _ = torch.ops.aten.convolution_backward(*given, [to_x, to_weight, False])
    return d_rows.permute(0, 2, 3, 1).reshape(x.shape) if to_x else None, d_weight.flatten(1) if to_weight else None


def _by_convolution() -> bool:
    """Whether torch computes a convolution by oneDNN."""
    return torch.get_num_threads() > 1 and _mkldnn.is_available()


def _image(x: Tensor) -> Tensor:
    """`[…, K]` → `[1, K, 1, tokens]`, channels last."""
    return x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return gradients(d_y, x, weight, *ctx.needs_input_grad)


def layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the `forward` of a layer: the same, with its linear maps as `linear` computes them."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *more: Any, **named: Any) -> Any:
        return original(_Mapped(self) if serves(hidden_states) else self, hidden_states, *more, **named)

    return forward


class _Mapped:
    """A module to look at, whose linear maps are called by `linear`. Attention functions get it in the module's place."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return _Map(found) if isinstance(found, nn.Linear) else found


class _Map(_Mapped):
    def __call__(self, x: Tensor) -> Tensor:
        return linear(self._module, x)


def can_stack(x: Tensor, *modules: nn.Module) -> bool:
    """Whether `stacked` may compute these maps of x from their weights."""
    return serves(x) and all(is_linear(each) for each in modules)


def stacked(x: Tensor, *groups: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """For each group of weights `[N_i, K]` the products with x `[…, K]` side by side, `[…, ΣN_i]` (`can_stack`)."""
    if torch.is_grad_enabled():
        return _Stacked.apply(x, [len(group) for group in groups], *[weight for group in groups for weight in group])
    return tuple(times(x, torch.cat(list(group))) for group in groups)


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], *weights: Tensor) -> tuple[Tensor, ...]:
        each = iter(weights)
        ctx.counts = counts
        ctx.joined = [_joined([next(each) for _ in range(count)]) for count in counts]
        ctx.save_for_backward(x, *weights)
        return tuple(times(x, weight) for weight in ctx.joined)

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        d_x: Tensor | None = None
        d_weights: list[Tensor | None] = []
        for count, joined, d_out in zip(ctx.counts, ctx.joined, d_outs, strict=True):
            here, weights = weights[:count], weights[count:]
            needed = any(ctx.needs_input_grad[2 + len(d_weights) :][:count])
            weight = torch.cat(here) if torch.is_grad_enabled() else joined  # to be differentiated again
            d_here, found = gradients(d_out, x, weight, ctx.needs_input_grad[0], needed)
            if d_here is not None:
                d_x = d_here if d_x is None else d_x + d_here if torch.is_grad_enabled() else d_x.add_(d_here)
            d_weights += found.split([len(weight) for weight in here]) if needed else [None] * count
        return d_x, None, *d_weights


def mlp(original: Forward) -> Forward:
    """Make the `forward` of an MLP with the maps `gate_proj`, `up_proj` and `down_proj` and the activation `act_fn`.

    Falcon-H1 multiplies the outputs of two of them.
    """

    @functools.wraps(original)
    def forward(self: Any, x: Tensor) -> Tensor:
        if not serves(x) or (weights := mlp_weights(self)) is None:
            return original(self, x)
        return swiglu(x, *weights)

    return forward


def mlp_weights(module: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """The weights of an MLP's gate, up and down; None if its maps are not plain, or its activation is not SiLU."""
    maps = module.gate_proj, module.up_proj, module.down_proj
    if not all(is_linear(each) for each in maps) or not is_silu(module.act_fn):
        return None
    gate, up, down = (each.weight for each in maps)
    opened, closed = getattr(module, "gate_multiplier", 1), getattr(module, "down_multiplier", 1)
    return gate if opened == 1 else gate * opened, up, down if closed == 1 else down * closed


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x `[…, K]` through the weights `gate` and `up` `[N, K]` and `down` `[M, N]`, `[…, M]`."""
    rows = x.reshape(-1, x.shape[-1])
    y = swiglu_of_experts(rows, [len(rows)], torch.cat([gate, up]).unsqueeze(0), down.unsqueeze(0))
    return y.view(*x.shape[:-1], len(down))


def swiglu_of_experts(x: Tensor, counts: Sequence[int], both: Tensor, down: Tensor) -> Tensor:
    """`[n, M]`: the first `counts[0]` rows of x `[n, K]` through `both[0]` `[2N, K]` and `down[0]` `[M, N]`, and so on."""
    if torch.is_grad_enabled():
        return _SwiGLU.apply(x, counts, both, down)
    return swiglu_spans(x, counts, both, down, keep=False)[0]


def swiglu_spans(
    x: Tensor, counts: Sequence[int], both: Tensor, down: Tensor, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    """The outputs, and with `keep` gate(x) and up(x) side by side `[n, 2N]` of each span."""
    parts, kept = [], []
    for e, now in _spans(counts, down):
        inner = times(x[now], both[e])
        g, u = inner.chunk(2, -1)
        parts.append(times(F.silu(g).mul_(u), down[e]))
        if keep:
            kept.append(inner)
    return _joined(parts), kept


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], both: Tensor, down: Tensor) -> Tensor:
        out, kept = swiglu_spans(x, counts, both, down, keep=True)
        ctx.counts = counts
        ctx.save_for_backward(x, both, down, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, both, down, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            inputs = [z for z in (x, both, down) if z.requires_grad]
            inner = [F.linear(rows, weight) for rows, weight in zip(x.split(ctx.counts), both, strict=True)]
            halves = [each.chunk(2, -1) for each in inner]
            again = torch.cat([F.linear(F.silu(g) * u, weight) for (g, u), weight in zip(halves, down, strict=True)])
            found = iter(torch.autograd.grad(again, inputs, d_out, create_graph=True))
            d_x, d_both, d_down = (next(found) if z.requires_grad else None for z in (x, both, down))
            return d_x, None, d_both, d_down
        to_x, _, *to_weights = ctx.needs_input_grad
        d_x, d_both, d_down = swiglu_back(d_out, x, ctx.counts, both, down, kept, to_x, *to_weights)
        return d_x, None, d_both, d_down


def swiglu_back(
    d_out: Tensor,
    x: Tensor,
    counts: Sequence[int],
    both: Tensor,
    down: Tensor,
    kept: Sequence[Tensor],
    to_x: bool,
    to_both: bool,
    to_down: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, `both` and `down`, those that are wanted, from that of the outputs and what the forward pass kept."""
    d_both, d_down = _Sums(both), _Sums(down)
    parts = []
    for (e, now), inner in zip(_spans(counts, down), kept, strict=True):
        g, u = inner.chunk(2, -1)
        opened = F.silu(g)
        d_h, found = gradients(d_out[now], opened * u, down[e], True, to_down)
        d_down.add(e, found)
        d_inner = torch.empty_like(inner)
        d_g, d_u = d_inner.chunk(2, -1)
        torch.mul(opened, d_h, out=d_u)
        torch.ops.aten.silu_backward.grad_input(d_h.mul_(u), g, grad_input=d_g)
        d_here, found = gradients(d_inner, x[now], both[e], to_x, to_both)
        d_both.add(e, found)
        parts.append(d_here)
    return _joined(parts) if to_x else None, d_both.all() if to_both else None, d_down.all() if to_down else None


class _Sums:
    """Gradients of the experts' weights `[E, …]`, summed over spans of tokens."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self.found: dict[int, Tensor] = {}

    def add(self, expert: int, found: Tensor | None) -> None:
        if found is not None:
            known = self.found.get(expert)
            self.found[expert] = found if known is None else known.add_(found)

    def all(self) -> Tensor:
        if len(self.weights) == 1 and self.found:
            return self.found[0].unsqueeze(0)
        none = torch.zeros_like(self.weights[0]) if len(self.found) < len(self.weights) else self.weights
        return torch.stack([self.found.get(expert, none) for expert in range(len(self.weights))])


def _joined(parts: list[Tensor]) -> Tensor:
    """One after the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _spans(counts: Sequence[int], down: Tensor) -> Iterator[tuple[int, slice]]:
    """Spans of tokens, each of one expert."""
    length, first = max(1, _SPAN // down.shape[2]), 0
    for expert, count in enumerate(counts):
        for start in range(first, first + count, length):
            yield expert, slice(start, min(start + length, first + count))
        first += count


def is_silu(activation: Any) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")  # torch's and transformers'


def is_plain(module: nn.Module) -> bool:
    """Whether a call of the module runs its class's `forward` and nothing else, on parameters in float32 on a CPU."""
    everywhere = compat.forward_hooks(())  # of all modules
    if everywhere is None or any(everywhere) or not compat.is_unmodified(module):
        return False
    return all(_ordinary(parameter) for parameter in module.parameters(recurse=False))


def is_linear(module: nn.Module) -> bool:
    """Whether a plain module is a linear map without a bias."""
    return type(module) is nn.Linear and module.bias is None and is_plain(module)


def untouched(*given: Tensor) -> bool:
    """Whether operations on these tensors run as written: on a CPU in float32, not traced, without autocast."""
    return not traced(*given) and all(_ordinary(x) for x in given) and not torch.is_autocast_enabled("cpu")


def _ordinary(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.device.type == "cpu"
