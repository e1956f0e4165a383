"""Attention as a memory: the state is a cache of keys and values.

    o_t = Σ_j softmax_j(q_tᵀ k_j · K^-½) v_j        over the tokens j ≤ t of t's document (and j > t - window, if there is one)

The cache is right-aligned: row b's last `length[b]` slots are real, the others zero. So new tokens are appended, even if
rows have read different numbers of tokens. Without a window the cache grows with the context. With one it has
window - 1 slots from the first token on, and a new token drops the oldest. Only the current document is kept. Caches keep
the inputs' dtype: unlike in a linear memory, nothing is summed in them. Other ways to weigh the cached values are
subclasses of `Attend` (pointwise.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from prism.engine.inputs import (
    check_flags,
    check_integer,
    check_padding_last,
    check_shape,
    describe,
    real_resets,
    repeat_heads,
    values_may_be_read,
    zero_padding,
)

Cache = dict[str, Tensor]  # k [B, S, G, K], v [B, S, G, V], length [B]


@dataclass(frozen=True, eq=False)
class Attend:
    """The tensors of attention for T tokens.

    Args:
        q: `[B, T, H, K]`, the queries.
        k: `[B, T, G, K]`, the keys. G divides H: head h reads group h // (H // G).
        v: `[B, T, G, V]`, the values.
        window: how many tokens a token sees, itself included; None sees all.
        reset: `[B, T]` bool, a document starts here: nothing before it is seen.
        mask: `[B, T]` bool, False is padding, which must follow the real tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    window: int | None = None
    reset: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def slots(self) -> int | None:
        """Size of the cache; None if it grows."""
        return None if self.window is None else self.window - 1

    def weigh(self, scores: Tensor, seen: Tensor) -> Tensor:
        """One token's scores `[B, H, S]`, its own slot last → the weights of the values. `seen` `[B, S]`: the visible slots."""
        return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)

    def initial(self, state: Cache | None) -> Cache:
        """The incoming cache; None: an empty one (with a window it has its full size from the start)."""
        if state is not None:
            return {"k": state["k"].to(self.k.dtype), "v": state["v"].to(self.v.dtype), "length": state["length"]}
        B, S = self.q.shape[0], self.slots or 0
        k, v = (x.new_zeros(B, S, *x.shape[2:]) for x in (self.k, self.v))
        return {"k": k, "v": v, "length": torch.zeros(B, dtype=torch.long, device=k.device)}


def recurrent(update: Attend, state: Cache | None = None) -> tuple[Tensor, Cache]:
    """The definition, one token after the other."""
    u, cache = without_padding(update), update.initial(state)
    outputs = []
    for t in range(u.tokens):
        now = slice(t, t + 1)
        token = _tokens(u, now)
        rows = append(token, cache)
        k, v = (repeat_heads(rows[name], u.q.shape[2]) for name in ("k", "v"))  # [B, S + 1, H, …]
        scores = torch.einsum("bhk,bshk->bhs", u.q[:, t], k) * u.q.shape[-1] ** -0.5
        seen = torch.arange(k.shape[1], device=k.device) >= first_seen(token, cache)  # [B, S + 1]
        outputs.append(torch.einsum("bhs,bshv->bhv", u.weigh(scores, seen), v))
        cache = advance(token, rows, cache)
    return zero_padding(torch.stack(outputs, 1), update.mask), cache


def parallel(update: Attend, state: Cache | None = None) -> tuple[Tensor, Cache]:
    """All tokens at once, through torch's fused attention. More tokens than the window run in blocks, so linear in T."""
    u, cache = without_padding(update), update.initial(state)
    rows = append(u, cache)
    if state is None and u.reset is None and (u.window is None or u.tokens <= u.window):
        o = _fused(u.q, u.k, u.v)  # padding comes last, so a causal mask is enough
    elif u.window is None or u.tokens <= u.window:
        S = cache["k"].shape[1]
        slot = torch.arange(rows["k"].shape[1], device=u.q.device)
        own = S + torch.arange(u.tokens, device=u.q.device)
        seen = (slot >= first_seen(u, cache)[..., None]) & (slot <= own[:, None])  # [B, T, S + T]
        with _any_length(u.q) if state is not None and u.window is None else nullcontext():
            o = _fused(u.q, rows["k"], rows["v"], seen)
    else:
        o = _in_blocks(u, rows, first_seen(u, cache))
    return zero_padding(o, update.mask), advance(u, rows, cache)


def check_state(update: Attend, state: Cache | None) -> None:
    """A state must be a cache of the update's batch, heads and sizes."""
    if state is None:
        return
    if not isinstance(state, dict) or set(state) != {"k", "v", "length"}:
        raise ValueError("state of an Attend must be a dict of the tensors k, v and length, as `memory` returned it")
    B, _, G, _ = update.k.shape
    for name, last in (("k", update.k.shape[-1]), ("v", update.v.shape[-1])):
        x = state[name]
        slots = x.shape[1] if update.slots is None and x.ndim == 4 else update.slots
        if tuple(x.shape) != (B, slots, G, last):
            raise ValueError(f"state {name!r} has shape {list(x.shape)}, expected [B, S, G, ·] = {[B, slots, G, last]}")
    check_shape("state 'length'", state["length"], (B,), "[B]")


def _tokens(u: Attend, some: slice) -> Attend:
    """The update of some of the tokens."""
    reset, mask = (None if x is None else x[:, some] for x in (u.reset, u.mask))
    return replace(u, q=u.q[:, some], k=u.k[:, some], v=u.v[:, some], reset=reset, mask=mask)


def append(u: Attend, cache: Cache) -> Cache:
    """Keys and values of the cache, then those of the tokens: `[B, S + T, G, …]`."""
    return {name: torch.cat([cache[name], x], 1) for name, x in (("k", u.k), ("v", u.v))}


def first_seen(u: Attend, cache: Cache) -> Tensor:
    """`[B, T]`, the first slot of cache-then-tokens that each token sees; the last one it sees is its own."""
    S = cache["k"].shape[1]
    index = torch.arange(u.tokens, device=u.q.device)
    first = (S - cache["length"])[:, None].expand(-1, u.tokens)
    if u.reset is not None:
        began = torch.where(u.reset, index, -1).cummax(1).values
        first = torch.where(began >= 0, S + began, first)
    return first if u.window is None else first.maximum(S + index - u.window + 1)


def advance(u: Attend, rows: Cache, cache: Cache) -> Cache:
    """The cache after these tokens: the last document's, ending at each row's last real token."""
    T, S = u.tokens, cache["k"].shape[1]
    length = cache["length"]
    real = torch.full_like(length, T) if u.mask is None else u.mask.sum(1)
    length = length + real
    if u.reset is not None:
        index = torch.arange(T, device=length.device)
        began = torch.where(u.reset, index, -1).amax(1)
        length = torch.where(began >= 0, real - began, length)
    if u.slots is not None:
        length = length.clamp(max=u.slots)
    slots = S + T if u.slots is None else u.slots
    uneven = u.mask is not None or u.reset is not None
    if u.slots is None and uneven and values_may_be_read(u.k):
        slots = int(length.max())  # drop slots that no row needs; reading the value is cheap here
    new = {}
    for name, x in rows.items():
        if u.mask is not None:  # move every row's last real token to the end
            index = torch.arange(S + T, device=length.device) - (T - real)[:, None]
            x = x.gather(1, index.clamp(min=0)[..., None, None].expand_as(x))
        x = x[:, S + T - slots :]
        if uneven:
            alive = torch.arange(slots, device=length.device) >= (slots - length)[:, None]
            x = torch.where(alive[..., None, None], x, 0.0)
        new[name] = x
    return {**new, "length": length}


def _in_blocks(u: Attend, rows: Cache, first: Tensor) -> Tensor:
    """Queries in blocks of W = window tokens: each block sees itself and the W slots before it."""
    W, T = u.window or 0, u.tokens
    before = rows["k"].shape[1] - T
    N = -(-T // W)
    end = N * W - T

    def blocks(x: Tensor) -> Tensor:  # [B, before + T, G, D] -> [B·N, 2W, G, D]
        x = F.pad(x, (0, 0, 0, 0, W - before, end))
        return torch.cat([x[:, : N * W].unflatten(1, (N, W)), x[:, W:].unflatten(1, (N, W))], 2).flatten(0, 1)

    q = F.pad(u.q, (0, 0, 0, 0, 0, end)).unflatten(1, (N, W)).flatten(0, 1)
    own = torch.arange(N * W, device=q.device)
    # First slots, counted in the padded rows, then in the block; padding queries see their own (zero) slot.
    start = torch.cat([first + W - before, (own[T:] + W).expand(first.shape[0], -1)], 1)
    start = (start - own // W * W).reshape(-1, W)  # [B·N, W]
    slot = torch.arange(2 * W, device=q.device)
    seen = (slot >= start[..., None]) & (slot <= W + torch.arange(W, device=q.device)[:, None])
    o = _fused(q, blocks(rows["k"]), blocks(rows["v"]), seen)
    return o.unflatten(0, (-1, N)).flatten(1, 2)[:, :T]


def _fused(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """`[B, T, H, K]`, `[B, S, G, ·]` → `[B, T, H, V]`; causal, or over the slots that `seen` `[B, T, S]` allows."""
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if seen is None else seen.unsqueeze(1),
        is_causal=seen is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)


def _any_length(q: Tensor) -> AbstractContextManager[None]:
    """Backends for a cache that grows. Not cuDNN, which torch may choose: it makes a new plan for every length."""
    if not q.is_cuda:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def without_padding(u: Attend) -> Attend:
    """The update with zeros on padding, where resets are ignored."""
    if u.mask is None:
        return u
    q, k, v = (zero_padding(x, u.mask) for x in (u.q, u.k, u.v))
    return replace(u, q=q, k=k, v=v, reset=real_resets(u.reset, u.mask))


def _check(u: Attend) -> None:
    for name, letters in (("q", "[B, T, H, K]"), ("k", "[B, T, G, K]"), ("v", "[B, T, G, V]")):
        x = getattr(u, name)
        if not isinstance(x, Tensor) or x.ndim != 4:
            raise ValueError(f"{name} must be a tensor of shape {letters}, got {describe(x)}")
    B, T, H, K = u.q.shape
    G = u.k.shape[2]
    if T == 0:
        raise ValueError(f"q has no tokens: shape {list(u.q.shape)}, expected T ≥ 1 in [B, T, H, K]")
    if tuple(u.k.shape) != (B, T, G, K) or G == 0 or H % G:
        raise ValueError(f"k has shape {list(u.k.shape)}, expected [B, T, G, K] = {[B, T, 'G', K]} with G dividing {H}")
    if tuple(u.v.shape[:3]) != (B, T, G):
        raise ValueError(f"v has shape {list(u.v.shape)}, expected [B, T, G, V] = {[B, T, G, 'V']}")
    check_integer("window", u.window, optional=True)
    check_flags(u.reset, u.mask, (B, T))
    check_padding_last(u.mask, "Attend")
