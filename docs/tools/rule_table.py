"""The README's table of rules, read off the registry and the engine.

    python docs/tools/rule_table.py         # rewrites the table in README.md; a test compares the two

The engine itself says what serves a rule on a GPU, for fake tensors that need none.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from prism import rules
from prism.engine import engine_of
from prism.engine.memory import chosen
from prism.nn.mixer import Span

README = Path(__file__).parents[2] / "README.md"
START, END = "<!-- rules: written by docs/tools/rule_table.py -->", "<!-- end of rules -->"
WIDTH, HEADS, TOKENS = 1024, 16, 128


def table() -> str:
    """The table and the links of its papers, as Markdown."""
    lines = ["| rule | paper | objective | CPU | own kernel |", "|---|---|---|---|---|"]
    links = []
    for number, name in enumerate(rules.names(), 1):
        kind = rules.get(name)
        paper = "" if kind.paper is None else f"[{kind.paper.authors}][{number}]"
        if kind.paper is not None:
            links.append(f"[{number}]: {kind.paper.url}")
        cpu, _ = chosen(*_engine_and_update(name))
        objective = kind.objective.text.replace("|", "\\|")
        lines.append(f"| `{name}` | {paper} | {objective} | {cpu} | {_own_kernel(name)} |")
    return "\n".join([*lines, "", *links])


def page() -> str:
    """README.md with the table as it should be."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(START)
    return f"{before}{START}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


def _own_kernel(name: str) -> str:
    if _gpu_backend(name) == "triton":
        return "yes"
    if "mini_batch" in rules.get(name).option_names() and _gpu_backend(name, form="serial", mini_batch=1) == "triton":
        return "`mini_batch=1`"
    return ""


def _gpu_backend(name: str, form: str = "auto", **options: Any) -> str | None:
    """What would compute a training sequence in bfloat16 on a GPU; None if nothing serves the form."""
    try:
        engine, update = _engine_and_update(name, **options)
        with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
            return chosen(engine, _on_gpu(update), form)[1].backend
    except ValueError:
        return None


def _engine_and_update(name: str, **options: Any) -> tuple[Any, Any]:
    with torch.device("meta"), torch.no_grad():
        rule = rules.get(name).build(WIDTH, HEADS, **options)
        update, *_ = rule.update(torch.zeros(1, TOKENS, WIDTH), {}, Span())
    while hasattr(update, "update"):  # an update that only wraps another
        update = update.update
    return engine_of(type(update)), update


def _on_gpu(update: Any) -> Any:
    """The same update with bfloat16 tensors that have a shape and a device, but no memory."""
    with FakeTensorMode():
        values = {field.name: _fake(getattr(update, field.name)) for field in dataclasses.fields(update) if field.init}
    first = {name: values.pop(name) for name in ("erase_first", "erase_write_first") if name in values}
    copy = type(update)(**values)
    for name, value in first.items():  # set afterwards: taking the first key of a fake tensor needs a GPU
        object.__setattr__(copy, name, value)
    return copy


def _fake(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
    return torch.empty(value.shape, dtype=dtype, device="cuda")


if __name__ == "__main__":
    README.write_text(page(), encoding="utf-8")
