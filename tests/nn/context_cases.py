"""Work for children: mixers of every rule on a sequence that is cut over processes, compared with one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prism import Mixer
from prism.engine.sequence_parallel import Context
from tests.helpers import relative_error

WIDTH, HEADS = 8, 2


@dataclass(frozen=True)
class Case:
    """A mixer and its tokens. `parts`: over how many processes a sequence is cut, the first ones of four."""

    rule: str
    tokens: int
    parts: int = 4
    reset: bool = False
    initial: bool = False
    form: str = "auto"
    double: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.rule, *self.options, f"{self.tokens}in{self.parts}", self.form]
        flags = [name for name in ("reset", "initial", "double") if getattr(self, name)]
        return "-".join([*words, *flags])


def compare_all(cases: list[Case], folder: Path) -> None:
    """Compare every case; writes {case: {tensor: relative error}} to a file of this process, or why one was refused."""
    dist.init_process_group("gloo")
    contexts = {4: Context(dist.group.WORLD), 2: Context(dist.new_subgroups(2)[0])}
    mine = [case for case in cases if dist.get_rank() < case.parts]
    found = {str(case): _compared_or_refused(case, contexts[case.parts]) for case in mine}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _compared_or_refused(case: Case, context: Context) -> dict[str, float] | str:
    try:
        return dict(_compare(case, context))
    except ValueError as error:
        return str(error)


def _compare(case: Case, context: Context) -> Iterator[tuple[str, float]]:
    torch.manual_seed(0)
    dtype = torch.float64 if case.double else torch.float32
    mixer = Mixer(case.rule, WIDTH, HEADS, **case.options)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    mixer = mixer.to(dtype)
    for parameter in mixer.parameters():  # gates, too
        parameter.data = parameter.data.to(dtype)
    B, T = 2, case.tokens
    x, before, weight = (torch.randn(B, n, WIDTH, dtype=dtype) for n in (T, 5, T))
    reset = torch.zeros(B, T, dtype=torch.bool)
    if (
        case.reset
    ):  # row 0: documents that end inside parts, over several, and at a border; row 1: nothing in most parts
        reset[0, [T // 2, T - 2]] = True
        reset[1, T // 3] = True
    state = mixer(before)[1].detach() if case.initial else None
    mine = context.part(T)

    def run(part: slice, context: Context | None) -> dict[str, Tensor]:
        """Outputs, the state after the last token and all gradients, for the tokens of a part."""
        mixer.zero_grad()
        own = x[:, part].clone().requires_grad_()
        start = None
        if state is not None:
            start = state.map(lambda z: z.clone().requires_grad_() if z.ndim > 2 else z)  # no positions, no stabiliser
        flags = reset[:, part] if reset[:, part].any() else None
        y, end = mixer(own, start, reset=flags, form=case.form, context=context)
        loss = (y * weight[:, part]).sum()
        ends = {name: z for name, z in end.tensors().items() if z.is_floating_point()}
        if context is None or context.last:
            loss = loss + sum(z.square().sum() for z in ends.values())
        loss.backward()
        found = {"y": y, "x": own.grad}
        weights = {f"weight {name}": _gradient(parameter) for name, parameter in mixer.named_parameters()}
        if context is not None:
            for gradient in weights.values():
                dist.all_reduce(gradient, group=context.group)
        found |= weights
        if context is None or context.last:
            found |= {f"end {name}": z for name, z in end.tensors().items()}
        if start is not None and (context is None or context.first):
            found |= {f"start {name}": _gradient(z) for name, z in start.tensors().items()}
        return {name: z.detach().clone() for name, z in found.items()}

    whole, part = run(slice(0, T), None), run(mine, context)
    for name, got in part.items():
        wanted = whole[name][:, mine] if name in ("y", "x") else whole[name]
        yield name, relative_error(got, wanted, scale=1e-3)


def _gradient(x: Tensor) -> Tensor:
    """A leaf's gradient; zero where there is none."""
    return torch.zeros_like(x) if x.grad is None else x.grad
