"""Replace functions of transformers by ours, in one model or everywhere, and put the originals back.

- Everywhere: the functions are globals of the modeling files. Each is replaced there and in every loaded module that imported
  it by name.
- In one model: its layers get a subclass of their class, whose `forward` is the same code with our functions as its globals.
  Other models keep theirs. Pickled, a layer is one of its original class.
"""

from __future__ import annotations

import copy
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from prism.hf import fla_backend
from prism.hf.families import FAMILIES, NOT_SERVED, Family, modeling_file

_undo: list[Callable[[], None]] = []
_ours: set[Any] = set()
"""Functions and classes that are in use as replacements."""


@dataclass
class Report:
    """What `accelerate` replaced and what it did not, and why."""

    replaced: dict[str, list[str]] = field(default_factory=dict)
    """Model family → functions, methods or layers that are ours now."""
    kept: dict[str, str] = field(default_factory=dict)
    """Family, or family and function → why the original stays."""

    def __str__(self) -> str:
        rows = [(name, "replaced", ", ".join(what)) for name, what in self.replaced.items()]
        rows += [(name, "kept", why) for name, why in self.kept.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(2)] if rows else [0, 0]
        return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows)


def accelerate(model: nn.Module | None = None, quiet: bool = False) -> Report:
    """Replace the memory functions of transformers' models by this library's.

    Args:
        model: replace them in this model alone; None: in transformers as a whole, for models that exist and those to come.
        quiet: do not print the report.

    Returns:
        What was replaced and what was not, and why. A second call replaces nothing and returns the same.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a torch module, or None for transformers as a whole, got {type(model).__name__}"
        )
    report = _everywhere() if model is None else _in_model(model)
    if not quiet:
        print(report)
    return report


def restore() -> None:
    """Put back everything that `accelerate` replaced."""
    while _undo:
        _undo.pop()()
    _ours.clear()


def _everywhere() -> Report:
    report = Report()
    wanted: dict[int, tuple[Any, Any]] = {}
    for family in FAMILIES:
        for name in family.models:
            file = _load(name)
            if file is None:
                report.kept[name] = "the installed transformers has no such model"
                continue
            done = [_plan_function(file, old, new, report, name, wanted) for old, new in family.functions.items()]
            done += [
                _replace_method(file, where, new, report, name) for where, new in family.replacements(name).items()
            ]
            report.replaced[name] = [each for each in done if each]
    _replace_functions(wanted)
    report.kept |= NOT_SERVED
    why_not = fla_backend.register(_undo)
    if why_not is None:
        report.replaced["flash-linear-attention"] = ["chunk_gated_delta_rule (backend)"]
    else:
        report.kept["flash-linear-attention"] = why_not
    return report


def _plan_function(
    file: ModuleType, old: str, new: str, report: Report, name: str, wanted: dict[int, tuple[Any, Any]]
) -> str | None:
    """Add a function to those that will be replaced, by the identity of the original."""
    original, ours = getattr(file, old, None), _function(new)
    if original is None:
        report.kept[f"{name}.{old}"] = "the installed transformers has no such function"
        return None
    if original is not ours:
        wanted[id(original)] = original, ours
    return old


def _replace_functions(wanted: Mapping[int, tuple[Any, Any]]) -> None:
    """Replace functions in every loaded module that holds them, under whatever name: others import them by name."""
    for module in list(sys.modules.values()) if wanted else ():
        if isinstance(module, ModuleType):
            for key, value in list(vars(module).items()):
                if id(value) in wanted:
                    _set(module, key, wanted[id(value)][1])


def _replace_method(file: ModuleType, where: str, new: str, report: Report, name: str) -> str | None:
    class_name, _, method = where.partition(".")
    owner = getattr(file, class_name, None)
    original = getattr(owner, method, None)
    if owner is None or original is None:
        report.kept[f"{name}.{where}"] = "the installed transformers has no such method"
        return None
    if original not in _ours:
        _set(owner, method, _function(new)(original))
    return where


def _in_model(model: nn.Module) -> Report:
    report = Report()
    known = {modeling_file(name): (name, family) for family in FAMILIES for name in family.models}
    for module in model.modules():
        kind = type(module)
        file, name = sys.modules.get(kind.__module__), kind.__name__
        if file is None or kind.__module__ not in known:
            continue
        family_name, family = known[kind.__module__]
        if kind not in _ours and not _already(module):
            faster = _subclass(kind, file, family, family_name)
            if faster is None:
                continue
            _change_class(module, faster)
        names = report.replaced.setdefault(family_name, [])
        if name not in names:
            names.append(name)
    if not report.replaced:
        raise ValueError(_nothing(model))
    return report


def _subclass(kind: type[nn.Module], file: ModuleType, family: Family, model: str) -> type[nn.Module] | None:
    """The class of a faster layer; None if this one has nothing to replace."""
    ours = {old: _function(new) for old, new in family.functions.items() if hasattr(file, old)}
    forward = _rebuilt(kind.forward, ours)
    methods: dict[str, Any] = {} if forward is kind.forward else {"forward": forward}
    for where, new in family.replacements(model).items():
        class_name, _, method = where.partition(".")
        if class_name == kind.__name__:
            methods[method] = _function(new)(methods.get(method, getattr(kind, method)))
    if not methods:
        return None
    named = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    made: type[nn.Module] = type(kind.__name__, (kind,), {**named, **_pickled_as(kind), **methods})
    _ours.add(made)
    return made


def _pickled_as(kind: type[nn.Module]) -> dict[str, Any]:
    """Methods by which a module is pickled as one of its original class, and copied as one of its own."""

    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced: Any = kind.__reduce_ex__(self, 0)  # from 2 on pickle insists on the own class
        make, arguments, *rest = reduced
        return make, tuple(kind if each is type(self) else each for each in arguments), *rest

    def copied(self: Any, change: Callable[[Any], Any], new: Any) -> Any:
        new.__setstate__(change(kind.__reduce_ex__(self, 2)[2]))
        return new

    def shallow(self: Any) -> Any:
        return copied(self, dict, object.__new__(type(self)))

    def deep(self: Any, memo: dict[int, Any]) -> Any:
        new = memo[id(self)] = object.__new__(type(self))
        return copied(self, lambda state: copy.deepcopy(state, memo), new)

    return {"__reduce_ex__": reduce_ex, "__copy__": shallow, "__deepcopy__": deep}


def _change_class(module: nn.Module, faster: type[nn.Module]) -> None:
    original, held = type(module), weakref.ref(module)
    module.__class__ = faster
    hooked = module.__dict__.get("_old_forward")  # the `accelerate` package keeps the method that its hook wraps
    if hooked is not None:
        module.__dict__["_old_forward"] = MethodType(faster.forward, module)

    def undo() -> None:
        layer = held()
        if layer is not None:
            layer.__class__ = original
            if hooked is not None:
                layer.__dict__["_old_forward"] = hooked

    _undo.append(undo)


def _already(module: nn.Module) -> bool:
    """Whether `accelerate()` has replaced this layer's functions everywhere."""
    function = _innermost(type(module).forward)
    return any(function.__globals__.get(name) in _ours for name in function.__code__.co_names if name in _names())


def _names() -> set[str]:
    return {name for family in FAMILIES for name in family.functions}


def _innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _rebuilt(function: Any, ours: Mapping[str, Any]) -> Any:
    """The same function, and the functions that it wraps, with `ours` among its globals; itself if it uses none of them."""
    if not isinstance(function, FunctionType):
        return function
    cells = list(function.__closure__ or ())
    for i, cell in enumerate(cells):
        if cell.cell_contents is function:
            continue
        inner = _rebuilt(cell.cell_contents, ours)
        if inner is not cell.cell_contents:
            cells[i] = types.CellType(inner)
    used = [name for name in function.__code__.co_names if name in ours]
    if not used and cells == list(function.__closure__ or ()):
        return function
    scope = function.__globals__
    if used:
        scope = {**scope, **ours}
        # torch.compile looks names up in the module of this name, where the original functions are.
        scope.pop("__name__", None)
    # A function that holds itself, to ask whether it is the outermost one, holds the new one then.
    itself = types.CellType()
    cells = [itself if cell.cell_contents is function else cell for cell in cells]
    new = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, tuple(cells) or None)
    itself.cell_contents = new
    new.__kwdefaults__, new.__module__ = function.__kwdefaults__, function.__module__
    new.__dict__.update(function.__dict__)
    new.__qualname__, new.__doc__ = function.__qualname__, function.__doc__
    if hasattr(function, "__wrapped__"):
        new.__wrapped__ = _rebuilt(function.__wrapped__, ours)  # type: ignore[attr-defined]
    return new


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, and remember how to put the old one back."""
    own, original = name in vars(owner), getattr(owner, name)
    _ours.add(value)
    setattr(owner, name, value)
    _undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))


def _function(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _load(model: str) -> ModuleType | None:
    try:
        return import_module(modeling_file(model))
    except ModuleNotFoundError:
        return None


def _nothing(model: nn.Module) -> str:
    kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    served = ", ".join(name for family in FAMILIES for name in family.models)
    why = f" ({NOT_SERVED[kind]})" if kind in NOT_SERVED else ""
    return f"model of type {kind!r} has nothing to replace{why}: accelerate serves {served}"
