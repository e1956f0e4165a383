"""Slot memories: M slots hold keys and values; a query finds slots by their keys and reads their values.

    K̃_t = Diag(exp g_t) K̃_{t-1} + s_t k_tᵀ          Ṽ_t = Diag(exp g_t) Ṽ_{t-1} + s_t v_tᵀ          o_t = Ṽ_tᵀ softmax(K̃_t q_t)

Both recurrences are linear with a decay per slot; only the softmax between them is not. Ṽ is a memory of the normal form
whose key channels are the slots. K̃ is read the other way round, over its values: in a chunk that is the attention matrix
q kᵀ spread over the slots (`ChannelDecay.spread`). The state is `{"keys": [B, H, M, K], "values": [B, H, M, V]}`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prism.engine.inputs import describe, zero_padding
from prism.engine.kernels.memory import dispatch
from prism.engine.linear.block import from_blocks, incoming_states, to_blocks
from prism.engine.linear.chunkwise import chunkwise as linear_chunkwise
from prism.engine.linear.decay import ChannelDecay
from prism.engine.linear.recurrent import recurrent as linear_recurrent
from prism.engine.update import Steps, Update, steps_of
from prism.engine.update import check_state as check_linear_state

Memories = dict[str, Tensor]
CHUNK = 32


@dataclass(frozen=True, eq=False)
class Slots:
    """The tensors of T tokens.

    Args:
        q: `[B, T, H, K]`, the queries.
        k: `[B, T, H, K]`, written into the slots' keys.
        v: `[B, T, H, V]`, written into the slots' values.
        write: s, `[B, T, H, M]`, how much of the token each slot takes.
        log_decay: g, `[B, T, H, M]`; finite and ≤ 0.
        reset, mask: as in `Update`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    write: Tensor
    log_decay: Tensor
    reset: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("q", "k", "v", "write", "log_decay"):
            x = getattr(self, name)
            if not isinstance(x, Tensor) or x.ndim != 4 or x.shape[:3] != self.q.shape[:3]:
                raise ValueError(f"{name} must be a tensor of shape [B, T, H, ·] like q, got {describe(x)}")
        if self.q.shape != self.k.shape:
            raise ValueError(f"k has shape {list(self.k.shape)}, expected that of q, {list(self.q.shape)}")
        self.written(self.k)  # checks the rest

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    def written(self, x: Tensor, read: Tensor | None = None) -> Update:
        """The linear memory `[M, ·]` that writes x `[B, T, H, ·]` into its slots; `read` `[B, T, H, M]`: weights per slot."""
        q = self.write if read is None else read
        return Update(q, self.write.unsqueeze(3), x.unsqueeze(3), self.log_decay, reset=self.reset, mask=self.mask)


def recurrent(update: Slots, state: Memories | None = None) -> tuple[Tensor, Memories]:
    """The definition, one token after the other."""
    steps, keys = _keys(update, state)
    scores = []
    for t in range(steps.rows):
        if steps.reset is not None:
            keys = torch.where(steps.reset[:, t, None, None, None], 0.0, keys)
        assert steps.log_decay is not None
        keys = steps.log_decay[:, t].exp().unsqueeze(-1) * keys + steps.k[:, t].transpose(-1, -2) @ steps.w[:, t]
        scores.append((keys @ steps.q[:, t].unsqueeze(-1)).squeeze(-1))
    return _values(update, torch.stack(scores, 1), keys, state, linear_recurrent)


def chunkwise(
    update: Slots,
    state: Memories | None = None,
    chunk: int = CHUNK,
    values: Callable[..., tuple[Tensor, Tensor]] = linear_chunkwise,
) -> tuple[Tensor, Memories]:
    """Both memories in chunks of `chunk` tokens, in matrix products. `values` computes Ṽ."""
    steps, keys = _keys(update, state)
    rows = to_blocks(steps, min(chunk, steps.rows))
    incoming, keys = incoming_states(rows, keys)
    decay = rows.decay()
    assert isinstance(decay, ChannelDecay)
    attention = rows.q @ rows.w.squeeze(-3).transpose(-1, -2)  # q kᵀ, [B, H, N, C, C]
    scores = decay.spread(attention, rows.k.squeeze(-3)) + decay.from_start(rows.q @ incoming.mT, before=False)
    return _values(update, from_blocks(scores, steps.rows), keys, state, values)


def chunkwise_by_kernel(update: Slots, state: Memories | None = None) -> tuple[Tensor, Memories]:
    """`chunkwise` with Ṽ in the GPU kernels. K̃, which decays along what is read, stays in torch: the kernels' memories
    decay along what is looked up."""
    return chunkwise(update, state, values=dispatch.run_chunks)


def kernel_refuses(update: Slots) -> str | None:
    """Why the kernels cannot compute Ṽ, in one clause; None if they can."""
    return dispatch.refuses(update.written(update.v))


def on_gpu(update: Slots) -> bool:
    """Whether `backend="auto"` tries the kernels."""
    return dispatch.on_gpu(update.written(update.v))


def check_state(update: Slots, state: Memories | None) -> None:
    """A state must be the memories `keys` `[B, H, M, K]` and `values` `[B, H, M, V]`."""
    if state is None:
        return
    if not isinstance(state, dict) or set(state) != {"keys", "values"}:
        raise ValueError("state of a Slots must be a dict of the tensors keys and values, as `memory` returned it")
    check_linear_state(update.written(update.k), state["keys"])
    check_linear_state(update.written(update.v), state["values"])


def _keys(u: Slots, state: Memories | None) -> tuple[Steps, Tensor]:
    """The steps of K̃, with the update's own q as queries, and K̃ before the first."""
    steps = steps_of(u.written(u.k))
    q = zero_padding(u.q.to(steps.q.dtype), u.mask)
    return replace(steps, q=q), steps.initial(None if state is None else state["keys"])


def _values(
    u: Slots, scores: Tensor, keys: Tensor, state: Memories | None, form: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Memories]:
    """Outputs and state: Ṽ in `form`, read with the softmax of `scores` `[B, T, H, M]`."""
    o, values = form(u.written(u.v, scores.softmax(-1)), None if state is None else state["values"])
    return o, {"keys": keys, "values": values}
