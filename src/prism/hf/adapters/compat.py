"""Everything that adapters rely on in peft and transformers without its being documented, checked where it is used.

- peft lists its methods in an enum, `PeftType`. A method from outside is added to it at run time.
- A Gated DeltaNet layer of transformers calls its memory through two names of its module, with keyword arguments, and passes
  its own unknown keyword arguments on to them. `listen` puts a function under these names that also calls the branches; so
  it does among the names of a `forward` that does not read those of its module.
- A cache keeps the conv and recurrent states of such a layer in dicts by number, of which a layer may have several
  (slots.py).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import peft
import torch
import transformers
from peft import PeftType
from torch import nn

MEMORY_FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
"""The names under which a module of transformers calls the memory."""
PASSED_ON = "prism_branches"
"""The keyword argument that travels through a layer's forward pass to its memory function."""
_LISTENS = "_prism_listens"


def add_peft_type(name: str) -> PeftType:
    """The member `name` of peft's enum of methods, added if it is not there."""
    if name in PeftType.__members__:
        return PeftType[name]
    try:
        member = str.__new__(PeftType, name)
        member._name_, member._value_ = name, name
        setattr(PeftType, name, member)
        PeftType._member_names_.append(name)
        PeftType._member_map_[name] = member
        PeftType._value2member_map_[name] = member
        complete = PeftType(name) is member and PeftType[name] is member and member in list(PeftType)
    except (AttributeError, TypeError) as error:
        raise ImportError(_unsupported_peft("its enum PeftType cannot be extended")) from error
    if not complete:
        raise ImportError(_unsupported_peft("its enum PeftType cannot be extended"))
    return member


def _unsupported_peft(why: str) -> str:
    return f"prism.hf.adapters does not support peft {peft.__version__}: {why}; install the version in constraints.txt"


def module_of(layer: nn.Module) -> ModuleType:
    """The module of transformers that defines a layer's forward pass."""
    return sys.modules[type(layer).__module__]


def problem(layer: nn.Module) -> str | None:
    """Why the memory of a Gated DeltaNet layer of transformers cannot be listened to, in one clause; None if it can."""
    module, forward = module_of(layer), inspect.unwrap(type(layer).forward)
    for name in MEMORY_FUNCTIONS:
        if not callable(getattr(module, name, None)):
            return f"{module.__name__} has no function {name}"
        if name not in forward.__code__.co_names:
            return f"{type(layer).__name__}.forward does not call {name}"
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(forward).parameters.values()):
        return f"{type(layer).__name__}.forward takes no further keyword arguments"
    missing = [name for name in ("hidden_states", "cache_params") if name not in inspect.signature(forward).parameters]
    missing += [
        name
        for name in ("layer_idx", "hidden_size", "num_v_heads", "head_k_dim", "head_v_dim")
        if not hasattr(layer, name)
    ]
    return f"{type(layer).__name__} has no {missing[0]}" if missing else None


def check(layer: nn.Module) -> None:
    """Raise ValueError if this version of transformers computes a layer in another way than adapters expect."""
    why = problem(layer)
    if why is not None:
        raise ValueError(
            f"adapters do not support transformers {transformers.__version__}, because {why}: install the version in "
            "constraints.txt"
        )


def listen(layer: nn.Module) -> None:
    """Let the memory functions that a layer calls also call the branches that the layer passes on, from now on.

    Called before every forward pass, which costs little: another library may have put its own functions there since.
    """
    module, kind = module_of(layer), type(layer)
    for name in MEMORY_FUNCTIONS:
        function = getattr(module, name)
        if getattr(function, _LISTENS, None) is not function:
            setattr(module, name, _listening(function))
    if kind.forward is not getattr(module, kind.__name__, kind).forward:
        _listen_in_method(kind.forward)


@torch.compiler.disable  # a compiler cannot follow changes of globals
def _listen_in_method(forward: Any) -> None:
    """As `listen`, in the globals of a method and of the functions that it wraps.

    `prism.accelerate(model)` gives the layers of one model a method that does not read its module's globals.
    """
    pending, seen = [forward], set[Any]()
    while pending:
        method = pending.pop()
        if not isinstance(method, FunctionType) or method in seen:
            continue
        seen.add(method)
        pending += [getattr(method, "__wrapped__", None), *(cell.cell_contents for cell in method.__closure__ or ())]
        names = method.__globals__
        for name in set(MEMORY_FUNCTIONS).intersection(method.__code__.co_names, names):
            if getattr(names[name], _LISTENS, None) is not names[name]:
                names[name] = _listening(names[name])


def _listening(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, and if branches were passed on, their output added to its own."""

    @functools.wraps(function)
    def listening(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        branches = kwargs.pop(PASSED_ON, None)
        o, state = function(query, key, value, *args, **kwargs)
        if branches is None:
            return o, state
        # Before transformers 5.23 the layer repeats the heads of queries and keys for those of the values, then its function.
        repeats = value.shape[2] // key.shape[2]
        if repeats > 1:
            query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
        return branches(o, query, key, value, **kwargs), state

    setattr(listening, _LISTENS, listening)  # itself: a function that imitates this one may copy its attributes
    return listening
