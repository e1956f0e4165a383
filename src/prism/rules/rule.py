"""What a rule is: two functions around a memory.

    update(x, carry, span) -> (update, carry, extra)     what is forgotten, erased, written and asked, from the input alone
    output(o, x, extra)    -> y                          bonus, skip, norm, gate, projection

A rule has no loop over time and knows no form: the engine computes its update. `extra` is whatever `output` needs that
`update` already has. Windows and positions travel in `carry`, a dict of tensors whose first dimension is the batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from prism.engine import FORMS
from prism.rules.objectives import Objective
from prism.rules.parts import Carry
from prism.rules.span import Span


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
