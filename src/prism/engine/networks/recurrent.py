"""The definition of a network memory: token by token, every token's weights formed. Slow, short, the oracle of the tests."""

from __future__ import annotations

import torch
from torch import Tensor

from prism.engine.networks.layout import places, position_after
from prism.engine.networks.network import Weights, orthogonalize, outer
from prism.engine.networks.state import Learned, NetworkState, advance, pack, restart, select, unpack, zeros_like
from prism.engine.networks.update import Averaged, InnerUpdate


def recurrent(update: InnerUpdate, state: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs `[B, T, H, V]` and the state after the last token."""
    u = update.prepared()
    incoming = unpack(u, state)
    learned, window = incoming.learned, incoming.window
    place = places(u.tokens, u.mini_batch, incoming.position, u.reset, u.q)
    outputs = []
    for t in range(u.tokens):
        if u.reset is not None:
            learned = restart(u, learned, u.reset[:, t])
            window = _forget(window, u.reset[:, t])
        token = (u.k[:, t : t + 1], u.v[:, t : t + 1], u.rate[:, t : t + 1])
        examples = tuple(torch.cat([old, new], 1) for old, new in zip(window, token, strict=True)) if window else token
        weights, gradient = _step(u, learned, examples, place[:, t], t)
        q = u.q[:, t].unsqueeze(-2)  # [B, H, 1, K]
        outputs.append(u.network.answer(u.network.logits(weights, q), q).squeeze(-2))
        after = advance(u, learned, weights, gradient, place[:, t] == u.mini_batch - 1)
        real = None if u.mask is None else u.mask[:, t]
        learned = after if real is None else _where(real, after, learned)
        if window:
            window = tuple(
                x[:, 1:] if real is None else torch.where(_rows(real, x), x[:, 1:], old)
                for x, old in zip(examples, window, strict=True)
            )
    position = position_after(place, u.mini_batch, incoming.position, u.mask)
    return u.finish(torch.stack(outputs, 1), update.v.dtype), pack(u, NetworkState(learned, position, window))


def _step(
    u: InnerUpdate, learned: Learned, examples: tuple[Tensor, ...], place: Tensor, t: int
) -> tuple[Weights, Weights]:
    """W_t and U_t from c examples k, v, rate `[B, c, H, …]`, the last one token t's."""
    k, v, rate = (x.transpose(1, 2) for x in examples)  # [B, H, c, …]
    inputs, deltas = u.network.gradient(learned.start, k, v)
    gradient = outer(u.network, inputs, deltas, rate.unsqueeze(-1))
    learner = u.learner
    if isinstance(learner, Averaged):
        if learned.gradient is not None:
            gradient = tuple(old + g for old, g in zip(learned.gradient, gradient, strict=True))
        scale = learner.scale[place][:, None, None, None]
        return tuple(w - scale * g for w, g in zip(learned.start, gradient, strict=True)), gradient
    if learner.log_momentum is not None and learned.gradient is not None:
        momentum = learner.log_momentum[:, t].exp()[..., None, None]
        gradient = tuple(momentum * old + g for old, g in zip(learned.gradient, gradient, strict=True))
    steps = gradient
    if learner.newton_schulz:
        steps = tuple(orthogonalize(g, learner.newton_schulz) for g in gradient)
    if learner.step is not None:
        steps = tuple(learner.step[:, t][..., None, None] * s for s in steps)
    weights = learned.base
    if learner.log_decay is not None:
        weights = tuple(learner.log_decay[:, t].exp()[..., None, None] * w for w in weights)
    return tuple(w - s for w, s in zip(weights, steps, strict=True)), gradient


def _where(real: Tensor, a: Learned, b: Learned) -> Learned:
    """Rows of a where `real` `[B]` is True, else of b."""
    old = b.gradient if b.gradient is not None or a.gradient is None else zeros_like(a.gradient)
    return Learned(
        select(real, a.start, b.start),
        None if a.current is None or b.current is None else select(real, a.current, b.current),
        None if a.gradient is None or old is None else select(real, a.gradient, old),
    )


def _forget(window: tuple[Tensor, ...], where: Tensor) -> tuple[Tensor, ...]:
    """The window with rate 0 in the rows `where` `[B]`: an example of another document weighs nothing."""
    return (*window[:2], torch.where(_rows(where, window[2]), 0.0, window[2])) if window else ()


def _rows(flag: Tensor, like: Tensor) -> Tensor:
    """`flag` `[B]` as `[B, 1, …]`, to broadcast against `like`."""
    return flag.reshape(-1, *[1] * (like.ndim - 1))
