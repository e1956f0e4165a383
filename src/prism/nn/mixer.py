"""`Mixer`, the module for every rule: it moves padding to the end, calls the rule, and runs the engine on its update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from prism import rules
from prism.engine import compat, engine_of, memory, memory_, token, using
from prism.engine.inputs import check_flags, packed_starts
from prism.engine.memory import cannot_be_shared, in_place_equivalent
from prism.engine.sequence_parallel import Context
from prism.nn.parameters import aligned_weights, assign, full_precision, gates, keep_gates_exact
from prism.nn.snapshot import Kept
from prism.nn.state import State
from prism.rules.parts import fewest_tokens
from prism.rules.rule import Carry, Span

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Mixer(nn.Module):
    """A layer that mixes tokens through a memory, used like `nn.GRU`.

    Args:
        rule: a name from `prism.rules.names()`, or a subclass of `prism.rules.Rule`.
        width: width of the tokens.
        heads: number of memories that run in parallel.
        options: options of the rule; `prism.rules.describe(rule)` and `prism rules NAME` list them.

    >>> mixer = Mixer("prism", 32, 2, steps=2)
    >>> x = torch.randn(1, 10, 32)
    >>> y, state = mixer(x)
    >>> first, state = mixer(x[:, :6])
    >>> second, state = mixer(x[:, 6:], state)
    >>> bool(torch.allclose(torch.cat([first, second], 1), y, atol=1e-5))
    True
    """

    def __init__(self, rule: str | type[rules.Rule], width: int, heads: int, **options: Any) -> None:
        super().__init__()
        with full_precision():
            self.rule = rules.get(rule).build(width, heads, **options)
            for name, value in aligned_weights(self.rule).items():
                assign(self.rule.get_parameter(name), value)
        self._merged: Kept[token.Merged | None] = Kept()
        self.to(torch.get_default_dtype())

    @property
    def state_size(self) -> int:
        return self.rule.state_size

    @property
    def write_rank(self) -> int:
        return self.rule.write_rank

    @property
    def forms(self) -> tuple[str, ...]:
        return self.rule.forms

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        form: str = "auto",
        backend: str = "auto",
        shared: dict[str, Tensor] | None = None,
        context: Context | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """x `[B, T, width]` → `[B, T, width]` and the state after the last real token.

        Args:
            state: the state that an earlier call returned; None starts with an empty memory.
            mask: `[B, T]` bool, False is padding, left, right or between. Padding changes neither the other outputs nor the
                state, and its outputs are zero.
            reset: `[B, T]` bool, True where a document starts: nothing before it is seen. Ignored on padding.
            form, backend: as in `prism.memory`. A named backend also applies to the kernels around the memory, except in
                compiled code, where only `prism.engine.using` around the call chooses those.
            shared: in a stack, one dict for all layers, new for every forward pass. Some rules store a tensor there for the
                layers above (RWKV-7 its first value).
            context: the processes that share a sequence (`prism.engine.sequence_parallel`). x is then this process's part of
                it, `state` the one before the first part, and the new state the one after this part. Padding is refused.
            cu_seqlens: offsets `[n + 1]` of n documents packed into one row, x `[1, T, width]`, instead of `reset`. The first
                document continues `state`, also if it is empty; the new state is that of the last one with real tokens.
        """
        state = State() if state is None else state
        if cu_seqlens is not None and isinstance(x, Tensor) and x.ndim == 3:
            reset = packed_starts(cu_seqlens, reset, x.shape[:2], mask)
        self._check(x, state, mask, reset)
        if context is not None and mask is not None:
            raise ValueError(
                "mask cannot be used with context: pack documents without padding and mark them with reset"
            )
        order = None
        if mask is not None:  # real tokens to the front, in order: rules only see padding at the end
            x = torch.where(mask.unsqueeze(-1), x, 0.0)
            order = torch.argsort(~mask, dim=1, stable=True)
            x, mask = _reorder(x, order), mask.gather(1, order)
            reset = None if reset is None else reset.gather(1, order) & mask
        span = Span(mask, reset, shared, context)
        named = backend != "auto" and not torch.compiler.is_compiling()
        with using(backend=backend) if named else nullcontext():
            update, carry, extra = self._update(x, state, span)
            self._check_part(update, carry, span)
            overwrite = context is None and state.overwrite and state.memory is not None
            if overwrite and in_place_equivalent(update, form, state.memory):
                o, new = memory_(update, state.memory, backend), state.memory
            else:
                o, new = memory(update, state.memory, form, backend, context)
            y = self.rule.output(o, x, extra)
        if state.memory is None and state.carry and new is not None:
            raise ValueError(
                f"state has a carry ({', '.join(state.carry)}) but no memory, which rule {self.rule.name!r} has: pass a state "
                "that this mixer returned"
            )
        if not torch.compiler.is_compiling() and y.shape != x.shape:
            raise ValueError(
                f"output of rule {self.rule.name!r} must return [B, T, width] = {list(x.shape)}, got {list(y.shape)}"
            )
        if order is not None:
            assert span.mask is not None  # nothing else is reordered
            y = _reorder(torch.where(span.mask.unsqueeze(-1), y, 0.0), order.argsort(1))
        return y, _compact(State(new, {name: value for name, value in carry.items() if value.numel()}))

    def decode(
        self, x: Tensor, state: State | None = None, shared: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, State]:
        """One token per row: x `[B, width]` → `[B, width]` and the new state, as `forward` gives them up to rounding.

        Without gradients (under `torch.no_grad()`) it takes the rule's shortest way for a token, which on a CPU may keep a
        merged copy of the weights until they change or the mixer is trained.
        """
        if not isinstance(x, Tensor) or x.ndim != 2:
            raise ValueError(
                f"decode takes one token per row: x must be [B, {self.rule.width}], got "
                f"{f'shape {list(x.shape)}' if isinstance(x, Tensor) else type(x).__name__}"
            )
        if not token.allowed(x) or not compat.is_unmodified(self):
            y, state = self(x.unsqueeze(1), state, shared=shared)
            return y.squeeze(1), state
        state = State() if state is None else state
        self._check(x.unsqueeze(1), state, None, None)
        return self.decode_unchecked(x, state, shared, self._merged.get(self, self._merge))

    def _merge(self) -> token.Merged | None:
        return token.Merged.of(self.rule.current_decoding_weights()) if is_plain(self) else None

    def decode_unchecked(
        self, x: Tensor, state: State, shared: dict[str, Tensor] | None, weights: Any = None
    ) -> tuple[Tensor, State]:
        """`decode` after its checks, for a stack of layers; `weights` as in `Rule.decode`."""
        try:
            y, memory, carry = self.rule.decode(x, state.memory, state.carry, shared, weights, state.overwrite)
        except (RuntimeError, IndexError):
            self(x.unsqueeze(1), state, shared=shared)  # says what is wrong with the state, if it is that
            raise
        new = _compact(State(memory, {name: value for name, value in carry.items() if value.numel()}))
        if (state.carry or state.memory is not None) and not _same_sizes(state, new):
            self(x.unsqueeze(1), state, shared=shared)  # says which part of the state does not fit
        return y, new

    def train(self, mode: bool = True) -> Mixer:
        if mode:
            self._merged.drop()
        return super().train(mode)

    @torch.no_grad()
    def check_cut(self, tokens: int) -> None:
        """Raise ValueError unless sequences can be cut into parts of `tokens` tokens, one per process."""
        maps = (part.weight for part in self.rule.modules() if isinstance(part, nn.Linear))
        like = next(maps, next(self.parameters()))
        update, _, _ = self._call_rule(
            torch.zeros(1, 1, self.rule.width, dtype=like.dtype, device=like.device), {}, Span()
        )
        self._refuse_cut(cannot_be_shared(update))
        shared = engine_of(type(update)).sequence_parallel
        fewest = max(fewest_tokens(self.rule), 1 if shared is None else shared.shortest(update))
        if tokens < fewest:
            raise ValueError(
                f"rule {self.rule.name!r} needs parts of at least {fewest} tokens where processes share a sequence, got "
                f"{tokens}: use longer sequences, or fewer processes for each"
            )

    def _check_part(self, update: Any, carry: dict[str, Tensor], span: Span) -> None:
        """In a part of a sequence, refuse an update that cannot be cut, and a carry that is not exchanged."""
        if span.context is None:
            return
        self._refuse_cut(cannot_be_shared(update))
        known = {id(value) for value in span.exchanged}
        for name, value in carry.items():
            if value.numel() and id(value) not in known:
                self._refuse_cut(f"carries {name!r}, which it does not exchange (`Span.previous`)")

    def _refuse_cut(self, problem: str | None) -> None:
        if problem is not None:
            raise ValueError(
                f"rule {self.rule.name!r} cannot share a sequence between processes, because it {problem}: use another "
                "rule, or one process per sequence (--parallel.context 1)"
            )

    def _check(self, x: Tensor, state: State, mask: Tensor | None, reset: Tensor | None) -> None:
        if not isinstance(state, State):
            raise ValueError(f"state must be a State that this mixer returned, got {type(state).__name__}")
        if not isinstance(x, Tensor):
            raise ValueError(f"x must be a tensor [B, T, {self.rule.width}], got {type(x).__name__}")
        if x.ndim != 3 or x.shape[-1] != self.rule.width or x.shape[1] == 0:
            raise ValueError(f"x has shape {list(x.shape)}, expected [B, T, {self.rule.width}] with T ≥ 1")
        self._check_dtype(x)
        for name, part in state.tensors().items():
            if part.shape[0] != x.shape[0]:
                raise ValueError(f"state has {part.shape[0]} rows ({name} {list(part.shape)}), x has {x.shape[0]}")
        check_flags(reset, mask, x.shape[:2])

    def _check_dtype(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise ValueError(f"x must hold floating-point numbers, got {x.dtype}")
        if torch.compiler.is_compiling() or x.is_meta or torch.is_autocast_enabled(x.device.type):
            return
        maps = (part.weight.dtype for part in self.rule.modules() if isinstance(part, nn.Linear))
        dtype = next(maps, x.dtype)
        if dtype != x.dtype and dtype in _FLOATS:
            raise ValueError(
                f"x is {x.dtype}, but the mixer's weights are {dtype}: convert one of them, for example with "
                f"mixer(x.to({dtype}))"
            )

    def _update(self, x: Tensor, state: State, span: Span) -> tuple[Any, dict[str, Tensor], Any]:
        """The rule's update. Refuses a carry of another rule or width; the engine checks the memory."""
        fresh = state.memory is None and not state.carry
        if fresh or torch.compiler.is_compiling():
            return self._call_rule(x, state.carry, span)
        try:
            update, carry, extra = self._call_rule(x, state.carry, span)
        except (RuntimeError, IndexError) as error:
            with torch.no_grad():  # the carry after one token has the expected shapes
                _, carry, _ = self._call_rule(torch.zeros_like(x[:1, :1]), {}, Span(None, None, None))
            self._check_carry(state, carry, error)
            raise
        self._check_carry(state, carry)
        return update, carry, extra

    def _call_rule(self, x: Tensor, carry: Carry, span: Span) -> tuple[Any, dict[str, Tensor], Any]:
        """What the rule's `update` returns. Refuses anything but (update, carry, extra)."""
        returned = self.rule.update(x, carry, span)
        if not isinstance(returned, tuple) or len(returned) != 3 or not isinstance(returned[1], dict):
            parts = ", ".join(type(part).__name__ for part in returned) if isinstance(returned, tuple) else ""
            raise ValueError(
                f"update of rule {self.rule.name!r} must return (update, carry, extra) with a dict as the carry, got "
                f"{f'({parts})' if parts else type(returned).__name__}"
            )
        return returned

    def _check_carry(self, state: State, carry: dict[str, Tensor], error: Exception | None = None) -> None:
        expected = {name: list(value.shape[1:]) for name, value in carry.items() if value.numel()}
        found = {name: list(value.shape[1:]) for name, value in state.carry.items()}
        if found != expected:
            raise ValueError(
                f"state does not fit rule {self.rule.name!r} of width {self.rule.width}: for each row it carries "
                f"{found or 'nothing'}, expected {expected or 'nothing'}; pass a state that this mixer returned"
            ) from error

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Mixer:
        """Called by `.to`, `.half` and `.bfloat16`: gates move with the mixer but stay in float32."""
        before = {name: gate.data for name, gate in gates(self).items()}
        super()._apply(fn, recurse)
        keep_gates_exact(self, before)
        return self

    def extra_repr(self) -> str:
        return f"rule={self.rule.name!r}, state_size={self.state_size}, write_rank={self.write_rank}"


def is_plain(module: nn.Module) -> bool:
    """Whether every module inside would do nothing but its own forward pass: no hooks, nothing replaced on an instance."""
    hooked = compat.forward_hooks(())  # the global ones
    return not (hooked is None or any(hooked)) and all(m is module or compat.is_unmodified(m) for m in module.modules())


def _same_sizes(old: State, new: State) -> bool:
    """Whether a state may be the one before another: caches, which are no single tensors, may grow."""
    if isinstance(new.memory, Tensor) and (not isinstance(old.memory, Tensor) or old.memory.shape != new.memory.shape):
        return False
    same = old.carry.keys() == new.carry.keys()
    return same and all(z.shape == new.carry[name].shape for name, z in old.carry.items())


def _compact(state: State) -> State:
    """The state without views of much larger tensors: those of a long prompt would stay in memory as long as the state.

    With gradients, and in compiled code, views stay views.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return state
    return state.map(lambda z: z.clone() if z.untyped_storage().nbytes() > 2 * z.nbytes else z)


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    """x `[B, T, D]` with position i of row b taken from token order[b, i]."""
    return x.gather(1, order.unsqueeze(-1).expand_as(x))
