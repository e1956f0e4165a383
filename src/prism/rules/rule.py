"""What a rule is: two functions around a memory.

    update(x, carry, span) -> (update, carry, extra)     what is forgotten, erased, written and asked, from the input alone
    output(o, x, extra)    -> y                          bonus, skip, norm, gate, projection

A rule has no loop over time and knows no form: the engine computes its update. `extra` is whatever `output` needs that
`update` already has. Windows and positions travel in `carry`, a dict of tensors whose first dimension is the batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from prism.engine import FORMS

# The test-time regression view: a memory learns, at every token, to answer the key with the value.
#
# A rule of this view is one (or several) steps of gradient descent on an objective, after a weight decay `keep`:
#
#     S ← keep ⊙ S;   S ← S - rate · ∂loss/∂S
#
# Memories are key-first, `[K, V]`: the answer to k is Sᵀk. `tests/rules/test_objectives.py` shows by autograd that
# each rule's
# update is exactly that.

Carry = Mapping[str, Tensor]


@dataclass(frozen=True)
class Objective:
    """A loss of the memory `[…, K, V]` at one key `[…, K]` and value `[…, V]`, and how people write it."""

    text: str
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """None where the rule imitates an objective without being a gradient step on it (PRISM's proxy)."""

    def descend(
        self, S: Tensor, k: Tensor, v: Tensor, rate: float | Tensor = 1.0, keep: float | Tensor = 1.0
    ) -> Tensor:
        """One decayed SGD step, by autograd."""
        if self.loss is None:
            raise ValueError(f"the objective {self.text!r} is a proxy: no gradient step on it gives the update")
        S = (keep * S).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss(S, k, v).sum(), S)
        return (S - rate * gradient).detach()


def answer(S: Tensor, k: Tensor) -> Tensor:
    """Sᵀk: `[…, K, V]`, `[…, K]` → `[…, V]`."""
    return (k.unsqueeze(-2) @ S).squeeze(-2)


def _correlation(S: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return -(answer(S, k) * v).sum(-1)


def _squared_error(S: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 0.5 * (answer(S, k) - v).square().sum(-1)


CORRELATION = Objective("-⟨Sk, v⟩", _correlation)
DECAYED_CORRELATION = Objective("-⟨Sk, v⟩ + decay", _correlation)
REGRESSION = Objective("½‖Sk - v‖²", _squared_error)
DECAYED_REGRESSION = Objective("½‖Sk - v‖² + decay", _squared_error)
REPEATED_REGRESSION = Objective("½‖Sk - v‖², several steps", _squared_error)
GENERALISED_REGRESSION = Objective("generalised ½‖Sk - v‖²")
RESIDUAL_PROXY = Objective("proxy of ½‖σ(Sk) - v‖²")


# Where a stretch of tokens begins and ends: padding, documents, and what must be remembered for the next stretch.
#
# Rules never meet padding between tokens: the mixer moves real tokens to the front first, so row b has `lengths[b]`
# real
# tokens followed by padding. A causal rule needs no more than that, except where it keeps the *last real* tokens.


@dataclass(frozen=True)
class Span:
    """T tokens of B rows. `mask` `[B, T]`: real tokens first, then padding. `reset` `[B, T]`: a document starts here.

    `shared` is a dict that one pass hands from layer to layer (RWKV-7's first value); None outside a stack.
    """

    mask: Tensor | None = None
    reset: Tensor | None = None
    shared: dict[str, Tensor] | None = None

    @property
    def lengths(self) -> Tensor | None:
        """`[B]`, the number of real tokens, or None if all are."""
        return None if self.mask is None else self.mask.sum(1)

    @property
    def documents(self) -> Tensor | None:
        """`[B, T]`, 0 for the document that began before this span, then 1, 2, …; None if there is only that one."""
        return None if self.reset is None else self.reset.long().cumsum(1)

    def last(self, rows: Tensor, count: int) -> Tensor:
        """The `count` rows up to the last real token. `rows` `[B, count + T, …]` begins with what came before the span."""
        if self.lengths is None:
            return rows[:, rows.shape[1] - count :]
        index = self.lengths[:, None] + torch.arange(count, device=rows.device)
        return rows.gather(1, index.reshape(*index.shape, *[1] * (rows.ndim - 2)).expand(-1, -1, *rows.shape[2:]))

    def positions(self, tokens: int, start: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's place in its document `[B, T]`, and the place `[B]` of the token after the last real one.

        `start` `[B]` is the place of the first token if no document starts in this span.
        """
        index = torch.arange(tokens, device=start.device).expand(start.shape[0], tokens)
        place = start[:, None] + index
        if self.reset is not None:
            began = torch.where(self.reset, index, -1).cummax(1).values
            place = torch.where(began >= 0, index - began, place)
        following = torch.cat([start[:, None], place + 1], 1)
        return place, self.last(following, 1)[:, 0]


# Initial weights: a rule or a part that sets weights itself returns them from `initial_weights`.
#
# All other weights of linear maps are left to torch in a `Mixer`, and to the configuration (`initializer_range`) in a
# model. A
# model draws its weights after it was built, perhaps on the meta device or sharded: so values are returned, not
# written.


class SetsWeights(Protocol):
    """A module with weights of its own."""

    def initial_weights(self) -> dict[str, Tensor]:
        """Newly drawn values by parameter name, on the current default device."""
        ...

    def get_parameter(self, target: str) -> nn.Parameter: ...


@torch.no_grad()
def set_initial_weights(part: SetsWeights) -> None:
    """Give a part the weights that it sets itself. Constructors call this once those parameters exist."""
    for name, value in part.initial_weights().items():
        part.get_parameter(name).copy_(value)


def uniform(shape: tuple[int, ...], bound: float) -> Tensor:
    """Drawn from U(-bound, bound)."""
    return torch.empty(shape).uniform_(-bound, bound)


class Paper(NamedTuple):
    """Where a rule was published."""

    title: str
    authors: str
    """And the year, as in "Yang et al. 2024"."""
    url: str


class Rule(nn.Module):
    """Base of every rule. Class attributes describe it (`prism rules` prints them); instances know their sizes.

    Options that many rules share:

    Args:
        key_dim: size of a head's queries and keys; width / heads by default.
        value_dim: size of a head's values; width / heads by default.
        conv_size: number of tokens a short causal convolution sees, this one included; 1 means no convolution.
        gate: whether the answer is multiplied by an activated linear map of the input.
        negative_eigenvalues: whether β is 2σ(·) instead of σ(·), so that the eigenvalue along the key can be negative.
        layer_index: position of the layer in its stack, from 0. A model sets it.
        layer_count: number of layers in the stack. A model sets it.
        eps: added to what the answer is divided by.
    """

    name: ClassVar[str]
    """The name to use in patterns and configurations; the name of the class if a class sets none."""
    paper: ClassVar[Paper | None] = None
    """Where the rule was published."""
    objective: ClassVar[Objective] = Objective("–")
    forgetting: ClassVar[str] = "–"
    transition: ClassVar[str] = "–"
    """The class of matrices that carry the state from token to token."""
    forms: tuple[str, ...] = FORMS
    constant_state: ClassVar[bool] = True
    """False for caches, which grow with the context."""
    shared_maps: ClassVar[tuple[str, ...] | None] = None
    """The linear maps, by attribute, that ask or answer: in a mixture of memories there is one for all. The others, which
    write and forget, are each memory's own. None: the rule cannot be mixed (unless it has no linear maps)."""
    query_first_maps: ClassVar[tuple[str, ...]] = ()
    """Maps whose first `query_size` outputs ask: those rows are shared in a mixture, the rest is each memory's own."""

    def __init__(self, width: int, heads: int, key_dim: int, value_dim: int, write_rank: int = 1) -> None:
        super().__init__()
        check_whole(width=width, heads=heads, key_dim=key_dim, value_dim=value_dim)
        self.width, self.heads, self.key_dim, self.value_dim = width, heads, key_dim, value_dim
        self.write_rank = write_rank
        self.state_size = heads * key_dim * value_dim
        """Numbers in the memory of one sequence (carries and open mini-batches not counted)."""

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
        """Construct the rule; an option it does not have is named, with those it has."""
        return construct(cls, width, heads, options)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The options that `build` takes besides width and heads."""
        return tuple(cls.option_parameters())

    @classmethod
    def option_parameters(cls) -> dict[str, inspect.Parameter]:
        """The options with their annotations and defaults. A class whose `build` takes more than its constructor adds them."""
        parameters = inspect.signature(cls.__init__).parameters
        return {
            name: parameter
            for name, parameter in parameters.items()
            if name not in ("self", "width", "heads")
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }

    def initial_weights(self) -> dict[str, Tensor]:
        """Initial values of the weights that the rule sets itself, by parameter name, newly drawn at every call.

        A rule with parameters of its own (`nn.Parameter`), or with a map that must not start as the model's configuration
        says (`"key.weight"`), overrides this, and calls `set_initial_weights(self)` in its constructor. Parts of a rule may
        have this method too; the rule's values override theirs.
        """
        return {}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Any, dict[str, Tensor], Any]:
        """x `[B, T, width]` → the engine's update, the carry for the next segment, and `extra` for `output`."""
        raise NotImplementedError

    def output(self, o: Tensor, x: Tensor, extra: Any) -> Tensor:
        """o `[B, T, H, V]`, x `[B, T, width]` → `[B, T, width]`."""
        raise NotImplementedError


_lookups: list[Callable[[str], type[Rule]]] = []


def look_up_with(lookup: Callable[[str], type[Rule]]) -> None:
    """Give rules that contain other rules the registry's `get`, without their importing the registry that lists them."""
    _lookups[:] = [lookup]


def rule_named(name: str) -> type[Rule]:
    """The class of another rule, for rules that contain one."""
    return _lookups[0](name)


def check_options(cls: type[Rule], options: Iterable[str]) -> None:
    for name in options:
        if name not in cls.option_names():
            raise ValueError(f"rule {cls.name!r} has no option {name!r}; it takes {', '.join(cls.option_names())}")


def construct(cls: type[Rule], width: int, heads: int, options: dict[str, Any]) -> Rule:
    check_options(cls, options)
    check_whole(width=width, heads=heads)  # before a rule divides one by the other
    return cls(width, heads, **options)


def check_whole(least: int = 1, **options: int) -> None:
    """Options that count something."""
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number ≥ {least}, got {value!r}")


def check_amount(**options: float) -> None:
    """Options that weigh something: rates, shares of a loss, epsilons."""
    for name, value in options.items():
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number ≥ 0, got {value!r}")


def per_head(width: int, heads: int, given: int | None, ratio: float = 1.0) -> int:
    """A head's size: what was asked for, or its share of `ratio · width`."""
    return max(1, int(width * ratio) // heads) if given is None else given


def depth(layer_index: int, layer_count: int) -> float:
    """Where a layer stands in its stack: 0 is the first, 1 the last, 0 if it is alone."""
    check_whole(layer_count=layer_count)
    if not isinstance(layer_index, int) or not 0 <= layer_index < layer_count:
        raise ValueError(f"layer_index must be one of 0 … layer_count - 1 = {layer_count - 1}, got {layer_index!r}")
    return layer_index / max(1, layer_count - 1)
