"""A Gated DeltaNet layer between its linear maps, in one pass over segments of tokens on a CPU.

    q, k, v = silu(conv(rows))     q, k of length 1, q times K^-½     o = gated delta rule     y = norm(o) ⊙ w ⊙ silu(gate)

Done one after the other over all tokens, each of these steps writes tensors of full size in both directions.
Here only the inputs, the outputs of the memory and what the engine
keeps have full size; the backward pass makes the rest again, segment by segment, and writes the gradient of each linear
map's output once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine import Update, memory
from prism.engine.inputs import repeat_heads
from prism.engine.layer_ops import UNIT_EPS
from prism.engine.linear.chunks import (
    EraseSegment,
    Kept,
    Kind,
    decays,
    erase_backward,
    erase_forward,
    fitting_rows,
    from_chunks,
    to_chunks,
)
from prism.engine.linear.chunkwise import MOST_ROWS, chunk_length
from prism.hf import norms
from prism.hf.conv import causal_conv1d_fn, span_back, taps_over

Layout = Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Tensor]]
"""Outputs of linear maps → views of them `[B, T, g, c]`: the channels of the convolution, in order, and the gate."""


class Sizes(NamedTuple):
    """What the tensors of a layer do not say."""

    layout: Layout
    heads: int
    """G, of queries and keys."""
    key: int
    """K."""
    eps: float
    """Of the norm."""


class Weights(NamedTuple):
    """The layer's parameters here."""

    taps: Tensor  # [D, W]
    bias: Tensor | None  # [D]
    norm: Tensor  # [V]


def gated_delta_layer(sizes: Sizes, sources: Sequence[Tensor], weights: Weights, g: Tensor, beta: Tensor) -> Tensor:
    """The outputs `[B, T, H·V]`.

    Args:
        sizes: of the layer.
        sources: outputs of linear maps, `[B, T, …]`, which the layout takes apart.
        weights: of the convolution and the norm.
        g: log-decay `[B, T, H]`, finite and ≤ 0.
        beta: `[B, T, H]`.
    """
    if not torch.is_grad_enabled():
        return _forward(sizes, sources, weights, g, beta, keep=False)[0]
    return _Layer.apply(sizes, *weights, g, beta, *sources)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sizes: Sizes, *given: Any) -> Tensor:
        *weights, g, beta = given[:5]
        y, kept = _forward(sizes, given[5:], Weights(*weights), g, beta, keep=True)
        ctx.sizes = sizes
        ctx.save_for_backward(*given, *[x for each in kept for x in each])
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: under gradient checkpointing every read recomputes the layer
        inputs = len(ctx.needs_input_grad) - 1
        given, flat = saved[:inputs], saved[inputs:]
        *parameters, g, beta = given[:5]
        weights, sources = Weights(*parameters), given[5:]
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            again = in_steps(ctx.sizes, sources, weights, g, beta)
            wanted = [x for x in given if x is not None and x.requires_grad]
            found = iter(torch.autograd.grad(again, wanted, d_y, create_graph=True))
            return (None, *[next(found) if x is not None and x.requires_grad else None for x in given])
        kept = [flat[i : i + _KEPT] for i in range(0, len(flat), _KEPT)]
        return (None, *_backward(ctx.sizes, sources, weights, g, beta, kept, d_y))


def in_steps(sizes: Sizes, sources: Sequence[Tensor], weights: Weights, g: Tensor, beta: Tensor) -> Tensor:
    """The same outputs, one operation after the other over all tokens; autograd can differentiate it twice."""
    parts, gate = sizes.layout(sources)
    rows = torch.cat([part.flatten(2) for part in parts], -1)
    x = causal_conv1d_fn(rows.transpose(1, 2), weights.taps, weights.bias, "silu").transpose(1, 2)
    q, k, v = _heads(x, sizes, g.shape[2])
    q, k = norms.unit_rows(q, sizes.key**-0.5), norms.unit_rows(k, 1.0).unsqueeze(3)
    w = (v * beta.unsqueeze(-1)).unsqueeze(3)
    o, _ = memory(Update(q, k, w, g, erase_strength=beta, erase_first=True))
    return norms.gated_norm(o, gate.reshape_as(o), weights.norm, sizes.eps).flatten(2)


_KEPT = 10
"""Tensors that a segment keeps: what the engine keeps (`Kept`), [N; M], the decays, and the outputs of the memory."""


def _forward(
    sizes: Sizes, sources: Sequence[Tensor], weights: Weights, g: Tensor, beta: Tensor, keep: bool
) -> tuple[Tensor, list[tuple[Any, ...]]]:
    """The outputs, and with `keep` the tensors that `_backward` needs of each segment."""
    parts, gate = sizes.layout(sources)
    (B, T, H), V = g.shape, len(weights.norm)
    y, S = g.new_empty(B, T, H * V), g.new_zeros(B * H, sizes.key, V)
    kept: list[tuple[Any, ...]] = []
    kind, length = _kind(sizes, g, V)
    for start in range(0, T, length):
        now = slice(start, min(start + length, T))
        tokens = _tokens(sizes, parts, weights, H, now, keep=False)
        s = _chunks(sizes, tokens, g, beta, now, kind)
        writes = s.x.new_empty(*s.x.shape[:2], V)
        to_chunks(tokens.v * beta[:, now].unsqueeze(-1), writes)
        part, S, found, MN = erase_forward(s, writes, S)
        o = _rows(part, g, now)
        opened = gate[:, now].reshape(-1, V)
        out = norms.gated_norm_forward(o.view(-1, V), opened, weights.norm, sizes.eps, gate_first=False)
        y[:, now] = out.view(B, -1, H * V)
        if keep:
            kept.append((*found, MN, s.gamma, s.start, s.end, s.carry, o))
    return y, kept


def _backward(
    sizes: Sizes,
    sources: Sequence[Tensor],
    weights: Weights,
    g: Tensor,
    beta: Tensor,
    kept: Sequence[Sequence[Any]],
    d_y: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of the weights, g, beta and the sources."""
    d_sources = [torch.empty_like(source) for source in sources]
    (parts, gate), (d_parts, d_gate) = sizes.layout(sources), sizes.layout(d_sources)
    d_taps, d_norm = torch.zeros_like(weights.taps), torch.zeros_like(weights.norm)
    d_bias = None if weights.bias is None else torch.zeros_like(weights.bias)
    d_g, d_beta = torch.empty_like(g), torch.empty_like(beta)
    (B, T, H), V = g.shape, len(weights.norm)
    dS, after = g.new_zeros(B * H, sizes.key, V), g.new_zeros(B, weights.taps.shape[1] - 1, weights.taps.shape[0])
    kind, length = _kind(sizes, g, V)
    for index in reversed(range(len(kept))):
        now = slice(index * length, min((index + 1) * length, T))
        *engine, MN, gamma, start, end, carry, o = kept[index]
        found = Kept(*engine)
        assert found.first is not None
        tokens = _tokens(sizes, parts, weights, H, now, keep=True)
        s = _chunks(sizes, tokens, g, beta, now, kind, (gamma, start, end, carry))
        d_o, d_opened, d_weight = norms.gated_norm_back(
            o.view(-1, V), gate[:, now].reshape(-1, V), weights.norm, sizes.eps, False, d_y[:, now].reshape(-1, V)
        )
        assert d_opened is not None
        d_gate[:, now] = d_opened.view_as(d_gate[:, now])
        d_norm += d_weight
        d_rows = s.z.new_empty(*s.z.shape[:2], V)
        to_chunks(d_o.view_as(o), d_rows[:, : s.chunk])
        d = erase_backward(s, MN, found, found.first, d_rows, dS, kind)
        assert d.decay is not None and d.strength is not None
        dS = d.incoming
        from_chunks(d.decay, d_g[:, now])
        d_q, d_k, d_w = (_rows(x, g, now) for x in (d.z[:, : s.chunk], d.x, d.y))
        d_beta[:, now] = _rows(d.strength, g, now) + (d_w * tokens.v).sum(-1)
        d_x = _rows_back(sizes, tokens, d_q, d_k, d_w, beta[:, now])
        d_here, after = span_back(tokens.rows, weights.taps, tokens.before, d_x, after, d_taps, d_bias)
        _scatter(d_parts, d_here, now)
    return d_taps, d_bias, d_norm, d_g, d_beta, *d_sources


class _Tokens(NamedTuple):
    rows: Tensor  # [B, ≤ W - 1 + n, D], with the last tokens before the segment
    before: Tensor  # [B, n, D], before SiLU
    x: Tensor  # [B, n, D], after it
    v: Tensor  # [B, n, H, V]
    inverse: Tensor  # [B, n, 2G, 1], of the lengths of q and k


def _tokens(sizes: Sizes, parts: Sequence[Tensor], weights: Weights, H: int, now: slice, keep: bool) -> _Tokens:
    """Some tokens behind the convolution; without `keep` the tensor before SiLU is overwritten."""
    past = min(now.start, weights.taps.shape[1] - 1)
    rows = _gathered(parts, slice(now.start - past, now.stop))
    before = taps_over(rows, weights.taps, weights.bias)[:, past : rows.shape[1]]
    x = F.silu(before, inplace=not keep)
    *_, v = _heads(x, sizes, H)
    both = x[..., : 2 * sizes.heads * sizes.key].unflatten(2, (2 * sizes.heads, sizes.key))
    return _Tokens(rows, before, x, v, norms.inverse_length(both, 1, UNIT_EPS))


def _chunks(
    sizes: Sizes, tokens: _Tokens, g: Tensor, beta: Tensor, now: slice, kind: Kind, weights: Any = None
) -> EraseSegment:
    """Queries and keys of length 1 in chunks, as the engine wants them; without `weights` the decays are computed."""
    (B, _, H), n, C = g.shape, now.stop - now.start, kind.chunk
    q, k, _ = (repeat_heads(x, H) for x in _heads(tokens.x, sizes, H))
    to_q, to_k = (repeat_heads(x, H) for x in tokens.inverse.split(sizes.heads, 2))
    m = -(-n // C) * B * H
    z, x, strength = q.new_empty(m, 2 * C, sizes.key), q.new_empty(m, C, sizes.key), q.new_empty(m, C)
    to_chunks(q * (to_q * sizes.key**-0.5), z[:, :C])
    to_chunks(k * to_k, x)
    to_chunks(beta[:, now], strength)
    torch.mul(x, strength.unsqueeze(-1), out=z[:, C:])
    weights = decays(beta[:, now], g[:, now], None, C, kind.read_before) if weights is None else weights
    return EraseSegment(z, x, strength.unsqueeze(-1), *weights)


def _rows(chunks: Tensor, g: Tensor, now: slice) -> Tensor:
    """`[m, C, …]` → `[B, n, H, …]`."""
    rows = chunks.new_empty(g.shape[0], now.stop - now.start, g.shape[2], *chunks.shape[2:])
    from_chunks(chunks, rows)
    return rows


def _rows_back(sizes: Sizes, s: _Tokens, d_q: Tensor, d_k: Tensor, d_w: Tensor, beta: Tensor) -> Tensor:
    """The gradient of x `[B, n, D]` from those of q and k of length 1 `[B, n, H, K]` and of β v `[B, n, H, V]`."""
    d_x, G, H = torch.empty_like(s.x), sizes.heads, d_q.shape[2]
    out = _heads(d_x, sizes, H)
    given = _heads(s.x, sizes, H)
    for i, (d, scale) in enumerate(((d_q, sizes.key**-0.5), (d_k, 1.0))):
        d = d if H == G else d.unflatten(2, (G, -1)).sum(3)
        inverse = s.inverse[:, :, i * G : (i + 1) * G]
        along = (d * given[i]).sum(-1, keepdim=True).mul_(inverse.pow(3)).mul_(scale)
        torch.mul(d, inverse * scale, out=out[i]).addcmul_(given[i], along, value=-1)
    torch.mul(d_w, beta.unsqueeze(-1), out=out[2])
    return d_x


def _heads(x: Tensor, sizes: Sizes, H: int) -> tuple[Tensor, Tensor, Tensor]:
    """The channels of the convolution `[B, n, D]` → views q, k `[B, n, G, K]` and v `[B, n, H, V]`."""
    width = sizes.heads * sizes.key
    q, k, v = x.split([width, width, x.shape[-1] - 2 * width], -1)
    return q.unflatten(2, (sizes.heads, -1)), k.unflatten(2, (sizes.heads, -1)), v.unflatten(2, (H, -1))


def _gathered(parts: Sequence[Tensor], now: slice) -> Tensor:
    """`[B, n, D]`: the channels side by side, for some tokens."""
    if len(parts) == 1:
        return parts[0][:, now].flatten(2)
    here = [part[:, now] for part in parts]
    widths = [part.shape[2] * part.shape[3] for part in here]
    rows = here[0].new_empty(*here[0].shape[:2], sum(widths))
    for target, part in zip(rows.split(widths, -1), here, strict=True):
        target.unflatten(2, part.shape[2:]).copy_(part)
    return rows


def _scatter(parts: Sequence[Tensor], rows: Tensor, now: slice) -> None:
    """The inverse of `_gathered`: write the channels of some tokens into the parts."""
    pieces = rows.split([part.shape[2] * part.shape[3] for part in parts], -1)
    for part, piece in zip(parts, pieces, strict=True):
        part[:, now] = piece.unflatten(2, part.shape[2:])


def _kind(sizes: Sizes, g: Tensor, V: int) -> tuple[Kind, int]:
    """The engine's settings, and the tokens of a segment, which it computes at once."""
    chunk = chunk_length(sizes.key, V)
    kind = Kind(chunk, MOST_ROWS // chunk * chunk, look_before=False, read_before=False)
    return kind, fitting_rows(g.shape[0] * g.shape[2] * max(sizes.key, V), kind)
