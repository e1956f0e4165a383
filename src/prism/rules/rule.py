"""The base class of rules, and the types that every rule uses.

A rule is two functions around a memory:

    update(x, carry, span) -> (update, carry, extra)     what is forgotten, erased, written and queried, from the input alone
    output(o, x, extra)    -> y                          bonus, skip, norm, gate, projection

A third one, `decode`, computes a single token per row. Its default calls these two; a rule may have a shorter way.

A rule has no loop over time and knows no form: the engine computes its update. `extra` passes on tensors that `update` has
computed and `output` also needs. Conv states and positions travel in `carry`, a dict of tensors whose first dimension is
the batch.

In this file, in order: `Rule`'s descriptions (`Objective`, `Paper`), its inputs (`Carry`, `Span`), initial weights, `Rule`
itself, and checks of options.

Many rules repeat a block of class attributes and a constructor signature. That is on purpose: the signature is the list of
options with their types and defaults (`Rule.option_parameters` reads it), and a rule's file says all of it in one place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from prism.engine import FORMS
from prism.engine.inputs import unchecked
from prism.engine.memory import one_token
from prism.engine.sequence_parallel import Context
from prism.engine.token import DeltaWeights

Carry = Mapping[str, Tensor]


@dataclass(frozen=True)
class Objective:
    """The loss that a memory minimises at test time, and how it is written in tables.

    In the test-time regression view a memory learns, at every token, to map the key to the value. A rule is one
    step (or several) of gradient descent on an objective, after a weight decay `keep`:

        S ← keep ⊙ S;   S ← S - rate · ∂loss/∂S

    Memories are key-first, `[K, V]`: reading with k gives Sᵀk. `tests/rules/test_objectives.py` shows by autograd that each
    rule's update is exactly that.
    """

    text: str
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """(memory `[…, K, V]`, key `[…, K]`, value `[…, V]`) → `[…]`. None where the rule imitates an objective without being a
    gradient step on it (PRISM's proxy)."""

    def descend(
        self, S: Tensor, k: Tensor, v: Tensor, rate: float | Tensor = 1.0, keep: float | Tensor = 1.0
    ) -> Tensor:
        """The memory after one SGD step with weight decay, by autograd."""
        if self.loss is None:
            raise ValueError(f"the objective {self.text!r} is a proxy: no gradient step on it gives the update")
        S = (keep * S).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss(S, k, v).sum(), S)
        return (S - rate * gradient).detach()


def read(S: Tensor, k: Tensor) -> Tensor:
    """Sᵀk: `[…, K, V]`, `[…, K]` → `[…, V]`."""
    return (k.unsqueeze(-2) @ S).squeeze(-2)


def _correlation(S: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return -(read(S, k) * v).sum(-1)


def _squared_error(S: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 0.5 * (read(S, k) - v).square().sum(-1)


CORRELATION = Objective("-⟨Sᵀk, v⟩", _correlation)
DECAYED_CORRELATION = Objective("-⟨Sᵀk, v⟩ + decay", _correlation)
TWO_CORRELATIONS = Objective("-⟨Sᵀk, v⟩ of two tokens + decay", _correlation)
REGRESSION = Objective("½‖Sᵀk - v‖²", _squared_error)
DECAYED_REGRESSION = Objective("½‖Sᵀk - v‖² + decay", _squared_error)
REGRESSION_FLOW = Objective("½‖Sᵀk - v‖², exact flow", _squared_error)
REPEATED_REGRESSION = Objective("½‖Sᵀk - v‖², several steps", _squared_error)
GENERALISED_REGRESSION = Objective("generalised ½‖Sᵀk - v‖²")
RESIDUAL_PROXY = Objective("proxy of ½‖σ(Sᵀk) - v‖²")


class Paper(NamedTuple):
    """Where a rule was published."""

    title: str
    authors: str
    """Authors and year, as in "Yang et al. 2024"."""
    url: str


@dataclass(frozen=True)
class Span:
    """One call's T tokens of B rows: which are padding, and where documents start.

    Rules never see padding between tokens: the mixer moves real tokens to the front first, so row b has `lengths[b]` real
    tokens followed by padding. A causal rule needs no more than that, except where it keeps the *last real* tokens.

    Args:
        mask: `[B, T]` bool, False is padding; real tokens first. None: all tokens are real.
        reset: `[B, T]` bool, True where a document starts. None: nowhere.
        shared: a dict that layers of a stack pass on within one forward pass (RWKV-7's first value); None outside one.
        context: the processes over which the sequence is cut; this span is then one part of it. What a rule carries must
            come from the part before: through `previous`, `positions`, or an exchange that `exchanged` records.
    """

    mask: Tensor | None = None
    reset: Tensor | None = None
    shared: dict[str, Tensor] | None = None
    context: Context | None = None
    exchanged: list[Tensor] = field(default_factory=list)
    """Entries of the new carry that took part in an exchange: the mixer refuses any other in a part of a sequence."""

    @property
    def lengths(self) -> Tensor | None:
        """`[B]`, the number of real tokens of each row; None if all are real."""
        return None if self.mask is None else self.mask.sum(1)

    @property
    def documents(self) -> Tensor | None:
        """`[B, T]`, each token's document: 0 if it began before this span, then 1, 2, …; None if there is only that one."""
        return None if self.reset is None else self.reset.long().cumsum(1)

    def previous(self, own: Tensor, first: Tensor | None) -> Tensor | None:
        """What was carried to this span: `first`, but in a later part of a sequence, what the part before it ends with. `own`
        is what this span ends with; it must follow from the span's own tokens."""
        if self.context is None:
            return first
        self.exchanged.append(own)
        return self.context.previous(own, first)

    def last(self, rows: Tensor, count: int) -> Tensor:
        """The `count` rows up to the last real token, `[B, count, …]`.

        `rows` `[B, count + T, …]` starts with the `count` rows before the span."""
        if self.lengths is None:
            return rows[:, rows.shape[1] - count :]
        index = self.lengths[:, None] + torch.arange(count, device=rows.device)
        return rows.gather(1, index.reshape(*index.shape, *[1] * (rows.ndim - 2)).expand(-1, -1, *rows.shape[2:]))

    def positions(self, tokens: int, start: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's position in its document `[B, T]`, and the position `[B]` of the token after the last real one.

        `start` `[B]` is the position of the first token if no document starts there.
        """
        if self.context is not None:
            start = self._start_of_part(self.context, tokens, start)
        index = torch.arange(tokens, device=start.device).expand(start.shape[0], tokens)
        position = start[:, None] + index
        if self.reset is not None:
            began = torch.where(self.reset, index, -1).cummax(1).values
            position = torch.where(began >= 0, index - began, position)
        following = self.last(torch.cat([start[:, None], position + 1], 1), 1)[:, 0]
        if self.context is not None:
            self.exchanged.append(following)
        return position, following

    def _start_of_part(self, context: Context, tokens: int, first: Tensor) -> Tensor:
        """The position `[B]` of this part's first token, if no document starts there; `first` is that of the first part."""
        alone = replace(self, context=None, exchanged=[])
        _, following = alone.positions(tokens, first if context.first else torch.zeros_like(first))
        restarts = torch.full_like(following, context.first)  # whether `following` does not depend on the start
        if self.reset is not None:
            restarts = restarts | self.reset.any(1)
        start = first
        for after, independent in context.gather(torch.stack([following, restarts]))[: context.rank]:
            start = torch.where(independent > 0, after, start + after)
        return start


@runtime_checkable
class SetsWeights(Protocol):
    """A module, a rule or a part of one, that initialises some of its weights itself.

    All other weights of linear maps are initialised by torch in a `Mixer`, and by the configuration (`initializer_range`) in
    a model. A model draws its weights after it was built, perhaps on the meta device or sharded: therefore
    `initial_weights` returns values instead of writing them.
    """

    def initial_weights(self) -> dict[str, Tensor]:
        """Newly drawn values by parameter name, on the current default device."""
        ...

    def get_parameter(self, target: str) -> nn.Parameter: ...


@torch.no_grad()
def set_initial_weights(part: SetsWeights) -> None:
    """Write the values of `part.initial_weights()` into its parameters. Constructors call this once those exist."""
    for name, value in part.initial_weights().items():
        part.get_parameter(name).copy_(value)


def uniform(shape: tuple[int, ...], bound: float) -> Tensor:
    """A tensor drawn from U(-bound, bound)."""
    return torch.empty(shape).uniform_(-bound, bound)


class Rule(nn.Module):
    """Base class of every rule. Class attributes describe it (`prism rules` prints them); instances know their sizes.

    Options that many rules share are described here:

    Args:
        key_dim: size of a head's queries and keys; width / heads by default.
        value_dim: size of a head's values; width / heads by default.
        conv_size: size of the short causal convolution, in tokens; 1 means no convolution.
        gate: whether the output is multiplied by an activated linear map of the input.
        negative_eigenvalues: whether β is 2σ(·) instead of σ(·), so that the eigenvalue along the key can be negative.
        layer_index: position of the layer in its stack, from 0. A model sets it.
        layer_count: number of layers in the stack. A model sets it.
        eps: added to the divisor of the output.
    """

    name: ClassVar[str]
    """Name in patterns and configurations; by default the name of the class."""
    paper: ClassVar[Paper | None] = None
    """Where the rule was published."""
    objective: ClassVar[Objective] = Objective("–")
    """What a write minimises."""
    forgetting: ClassVar[str] = "–"
    """What decides how much is forgotten: nothing, a number per head, per channel …"""
    transition: ClassVar[str] = "–"
    """The class of matrices that carry the state from token to token."""
    forms: tuple[str, ...] = FORMS
    """The forms in which the engine can compute the update."""
    constant_state: ClassVar[bool] = True
    """False for caches, which grow with the context."""
    shared_maps: ClassVar[tuple[str, ...] | None] = None
    """Attributes of the linear maps for queries and outputs, which all memories of a mixture share. Each memory has its own
    copy of the other maps, which write and forget. None: the rule cannot be mixed (unless it has no linear maps)."""
    query_first_maps: ClassVar[tuple[str, ...]] = ()
    """Maps whose first `query_size` outputs are queries: a mixture shares those rows, and each memory has its own rest."""

    described: ClassVar[tuple[str, ...]] = ("update", "output", "decode")
    """Methods whose work `decoding_weights` describes."""

    def __init__(self, width: int, heads: int, key_dim: int, value_dim: int, write_rank: int = 1) -> None:
        super().__init__()
        check_integers(width=width, heads=heads, key_dim=key_dim, value_dim=value_dim)
        self.width, self.heads, self.key_dim, self.value_dim = width, heads, key_dim, value_dim
        self.write_rank = write_rank
        self.state_size = heads * key_dim * value_dim
        """Numbers in the memory of one sequence (without the carry and a partial mini-batch)."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    @property
    def query_size(self) -> int:
        """Channels of a token's queries, over all heads."""
        return self.heads * self.key_dim

    @classmethod
    def build(cls, width: int, heads: int, **options: Any) -> Rule:
        """Construct the rule. An unknown option is a ValueError that lists the known ones."""
        return construct(cls, width, heads, options)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Names of the options that `build` takes in addition to width and heads."""
        return tuple(cls.option_parameters())

    @classmethod
    def option_parameters(cls) -> dict[str, inspect.Parameter]:
        """Options with their annotations and defaults. Override it where `build` takes more than the constructor."""
        parameters = inspect.signature(cls.__init__).parameters
        return {
            name: parameter
            for name, parameter in parameters.items()
            if name not in ("self", "width", "heads")
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }

    @classmethod
    def with_sizes(cls, sizes: Mapping[str, int], options: Mapping[str, Any]) -> dict[str, Any]:
        """`options` with those of `sizes` (`key_dim`, `value_dim`, `conv_size`) that the rule takes; options win."""
        taken = cls.option_names()
        return {**{name: size for name, size in sizes.items() if name in taken}, **options}

    def initial_weights(self) -> dict[str, Tensor]:
        """Initial values of the weights that the rule sets itself, by parameter name, newly drawn at every call.

        Override it in a rule that has an `nn.Parameter`, or a linear map that must not be initialised as the model's
        configuration says (`"key.weight"`), and call `set_initial_weights(self)` in the constructor. Parts of a rule may have
        this method too; the rule's values override theirs.
        """
        return {}

    def aligned_weights(self, weight: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Initial values that depend on other weights, by parameter name, from `weight(name)`, how those were drawn.

        A `Mixer` and a model call it after all weights were drawn, so that a map may start equal to another one at whatever
        scale the model draws its maps. A rule in a mixture of memories sees the maps of one memory at a time. A subclass
        that sets more adds its values to those of `super()`.
        """
        return {}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Any, dict[str, Tensor], Any]:
        """x `[B, T, width]` → the engine's update, the carry for the next call, and `extra` for `output`."""
        raise NotImplementedError

    def output(self, o: Tensor, x: Tensor, extra: Any) -> Tensor:
        """o `[B, T, H, V]`, x `[B, T, width]` → `[B, T, width]`."""
        raise NotImplementedError

    def decode(
        self,
        x: Tensor,
        memory: Any,
        carry: Carry,
        shared: dict[str, Tensor] | None = None,
        weights: Any = None,
        overwrite: bool = False,
    ) -> tuple[Tensor, Any, dict[str, Tensor]]:
        """One token per row, x `[B, width]` → `[B, width]`, the memory and the carry after it. Without gradients.

        Args:
            memory, carry: of the token before; None and {} at the start of a sequence.
            shared: as in `Span`.
            weights: what was made of `current_decoding_weights`, for rules with a shorter way.
            overwrite: whether the memory may be updated in place.
        """
        row = x.unsqueeze(1)
        with unchecked():
            update, carried, extra = self.update(row, carry, Span(shared=shared))
        o, new = one_token(update, memory, overwrite)
        return self.output(o, row, extra).squeeze(1), new, carried

    def decoding_weights(self) -> DeltaWeights | None:
        """The weights by role, if engine/token.py can compute a token of this rule; None: `update` and `output` do.

        It describes the methods in `described` of the class that defines it."""
        return None

    def current_decoding_weights(self) -> DeltaWeights | None:
        """`decoding_weights()`, unless a subclass has overridden something that these describe."""
        for cls in type(self).__mro__:
            if "decoding_weights" in cls.__dict__:
                return self.decoding_weights()
            if any(name in cls.__dict__ for name in self.described):
                return None
        return None


_lookups: list[Callable[[str], type[Rule]]] = []


def set_rule_lookup(lookup: Callable[[str], type[Rule]]) -> None:
    """Set the function behind `rule_named`: the registry's `get`, which rules that contain others cannot import."""
    _lookups[:] = [lookup]


def rule_named(name: str) -> type[Rule]:
    """The class of a registered rule, for rules that contain another one."""
    return _lookups[0](name)


def check_options(cls: type[Rule], options: Mapping[str, Any]) -> None:
    """Raise a ValueError for an option that the rule does not have, and for a switch that is no bool: "no" counts as true."""
    known = cls.option_parameters()
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"rule {cls.name!r} has no option {name!r}; it takes {', '.join(known)}")
        if known[name].annotation in ("bool", bool) and not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")


def construct(cls: type[Rule], width: int, heads: int, options: dict[str, Any]) -> Rule:
    """Build the rule after checking its options, width and heads."""
    check_options(cls, options)
    check_integers(width=width, heads=heads)  # before a rule divides one by the other
    return cls(width, heads, **options)


def check_integers(least: int = 1, **options: int) -> None:
    """Raise a ValueError for an option that is not an integer ≥ `least`."""
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer ≥ {least}, got {value!r}")


def check_nonnegative(**options: float) -> None:
    """Raise a ValueError for an option that is not a finite number ≥ 0: rates, loss weights, epsilons."""
    for name, value in options.items():
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number ≥ 0, got {value!r}")


def check_choices(**options: tuple[str, tuple[str, ...]]) -> None:
    """Raise a ValueError for an option, given as (value, choices), that is not one of its choices."""
    for name, (value, choices) in options.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def per_head(width: int, heads: int, given: int | None, ratio: float = 1.0) -> int:
    """Size of a head: `given`, or by default `ratio · width / heads`, rounded down."""
    return max(1, int(width * ratio) // heads) if given is None else given


def depth(layer_index: int, layer_count: int) -> float:
    """Relative depth of a layer in its stack: 0 is the first layer, 1 the last; 0 for a single layer. Checks both numbers."""
    check_integers(layer_count=layer_count)
    if not isinstance(layer_index, int) or not 0 <= layer_index < layer_count:
        raise ValueError(f"layer_index must be one of 0 … layer_count - 1 = {layer_count - 1}, got {layer_index!r}")
    return layer_index / max(1, layer_count - 1)
