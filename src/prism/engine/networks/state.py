"""State of a network memory between calls, including the current partial mini-batch.

`prism.memory` returns it as a flat dict of tensors with the batch first:

    w1 … b1 …                   the weights
    start.w1 …                  where the partial mini-batch takes its gradients, if that is elsewhere (`Momentum`, b > 1)
    gradient.w1 …               U: the momentum, or the partial mini-batch's sum (`Averaged`, b > 1)
    position                    `[B]`, how many tokens the partial mini-batch has (b > 1)
    window.k, .v, .rate         the last c - 1 examples (c > 1), rate 0 where there were none
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prism.engine.networks.network import Weights
from prism.engine.networks.update import InnerUpdate


class Learned(NamedTuple):
    """The weights and U after the tokens so far."""

    start: Weights
    """Where the gradients of the partial mini-batch are taken."""
    current: Weights | None
    """The weights the last token read, if the next step starts from these; None: it starts from `start`."""
    gradient: Weights | None
    """U; None is zero."""

    @property
    def base(self) -> Weights:
        """The weights from which the next step starts."""
        return self.start if self.current is None else self.current


class NetworkState(NamedTuple):
    learned: Learned
    position: Tensor | None
    """`[B]`; None is zero for every row."""
    window: tuple[Tensor, ...]
    """k, v and rate `[B, c - 1, H, …]`; empty if c = 1."""


def unpack(u: InnerUpdate, state: dict[str, Tensor] | None) -> NetworkState:
    """Read an incoming state; None: the start of a document."""
    count = u.window - 1
    if state is None:
        window = tuple(x.new_zeros(u.batch, count, *x.shape[2:]) for x in (u.k, u.v, u.rate)) if count else ()
        # A copy for each row: a state must not change when the parameters do.
        start = tuple(w.repeat(u.batch, 1, 1, 1) for w in u.network.start(u.state_dtype))
        return NetworkState(Learned(start, start if u.keeps_current else None, None), None, window)
    names = _names(u)

    def weights(prefix: str = "") -> Weights:
        return tuple(state[prefix + name].to(u.state_dtype) for name in names)

    learned = Learned(
        weights("start.") if u.keeps_current else weights(),
        weights() if u.keeps_current else None,
        weights("gradient.") if u.keeps_gradient else None,
    )
    window = tuple(state[f"window.{name}"].to(u.state_dtype) for name in ("k", "v", "rate")) if count else ()
    return NetworkState(learned, state.get("position"), window)


def pack(u: InnerUpdate, new: NetworkState) -> dict[str, Tensor]:
    """The state as the caller gets it, the inverse of `unpack`."""
    names, learned = _names(u), new.learned
    state = dict(zip(names, learned.base, strict=True))
    if u.keeps_current:
        state |= {f"start.{name}": w for name, w in zip(names, learned.start, strict=True)}
    if u.keeps_gradient:
        gradient = learned.gradient or zeros_like(learned.start)
        state |= {f"gradient.{name}": w for name, w in zip(names, gradient, strict=True)}
    if u.mini_batch > 1:
        none = torch.zeros(u.batch, dtype=torch.long, device=u.q.device)
        state["position"] = none if new.position is None else new.position
    if new.window:
        state |= {f"window.{name}": x for name, x in zip(("k", "v", "rate"), new.window, strict=True)}
    return state


def restart(u: InnerUpdate, learned: Learned, where: Tensor | bool) -> Learned:
    """Restart the rows where `where` `[B]` is True: they begin a document."""
    if where is False:
        return learned
    start, gradient = u.network.start(u.state_dtype), learned.gradient
    return Learned(
        select(where, start, learned.start),
        None if learned.current is None else select(where, start, learned.current),
        None if gradient is None else select(where, zeros_like(gradient), gradient),
    )


def advance(
    u: InnerUpdate, learned: Learned, weights: Weights, gradient: Weights | None, full: Tensor | bool
) -> Learned:
    """The state after tokens that lead to `weights` and U = `gradient`. `full` `[B]`: their mini-batch ends here."""
    if not u.keeps_gradient:
        gradient = None
    if u.keeps_current:
        return Learned(select(full, weights, learned.start), weights, gradient)
    if u.mini_batch == 1:
        return Learned(weights, None, gradient)
    # Averaged: the step is taken when the mini-batch is full, and its sum restarts.
    if full is True:
        return Learned(weights, None, None)
    assert gradient is not None
    return Learned(select(full, weights, learned.start), None, select(full, zeros_like(gradient), gradient))


def select(where: Tensor | bool, a: Weights, b: Weights) -> Weights:
    """Rows of a where `where` `[B]` is True, else of b."""
    if isinstance(where, bool):
        return a if where else b
    return tuple(torch.where(where[:, None, None, None], x, y) for x, y in zip(a, b, strict=True))


def zeros_like(weights: Weights) -> Weights:
    return tuple(torch.zeros_like(w) for w in weights)


def _names(u: InnerUpdate) -> list[str]:
    kinds = "w" if u.network.biases is None else "wb"
    return [f"{kind}{layer + 1}" for kind in kinds for layer in range(u.network.depth)]


def check_state(u: InnerUpdate, state: Any) -> None:
    """A state must have the names and shapes of `pack`."""
    if state is None:
        return
    expected = _shapes(u)
    if not isinstance(state, dict) or set(state) != set(expected):
        raise ValueError(
            f"state must be a dict of the tensors {', '.join(expected)}, as `memory` returned it for such an update"
        )
    for name, shape in expected.items():
        if tuple(state[name].shape) != shape:
            raise ValueError(f"state {name!r} has shape {list(state[name].shape)}, expected {list(shape)}")


def _shapes(u: InnerUpdate) -> dict[str, tuple[int, ...]]:
    """The shapes of what `pack` returns, without making it: a state is checked at every token of a stream."""
    weights = zip(_names(u), u.network.start(u.state_dtype), strict=True)
    own = {name: (u.batch, *w.shape[1:]) for name, w in weights}
    prefixes = ["", *["start."] * u.keeps_current, *["gradient."] * u.keeps_gradient]
    shapes = {prefix + name: shape for prefix in prefixes for name, shape in own.items()}
    if u.mini_batch > 1:
        shapes["position"] = (u.batch,)
    if u.window > 1:
        examples = {"k": u.k, "v": u.v, "rate": u.rate}
        shapes |= {f"window.{name}": (u.batch, u.window - 1, *x.shape[2:]) for name, x in examples.items()}
    return shapes
