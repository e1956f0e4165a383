"""A sequence that is cut over processes gives the outputs, states and gradients of one process, for every rule."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from prism import Mixer, rules
from prism.engine import memory
from prism.engine.memories.diagonal import Diagonal, as_real, total_decay
from prism.engine.sequence_parallel import Context
from prism.engine.update import Update
from prism.rules.rule import Carry, Rule, Span
from tests.children import finish, start_children
from tests.helpers import assert_close, relative_error
from tests.nn.context_cases import Case, compare_all

UNCUT = ("mom", "slstm", "ttt_linear", "ttt_mlp", "titans", "atlas", "softmax", "hstu")
"""Rules whose state has no affine map over a part, or which see all tokens."""
OPTIONS = {"sliding_window": {"window": 4}, "s4d": {"key_dim": 4}, "mamba3": {"key_dim": 4}, "based": {"key_dim": 2}}
CUT = [name for name in rules.names() if name not in UNCUT]
CASES = [
    *[Case(name, 23, reset=True, initial=True, options=OPTIONS.get(name, {})) for name in CUT],
    *[Case(name, 16, parts=2, double=False, options=OPTIONS.get(name, {})) for name in CUT],
    *[Case(name, 12, parts=4) for name in UNCUT],
    *[Case("kda", 13, reset=True, form=form) for form in ("recurrent", "parallel", "scan")],
    Case("gated_delta", 150, parts=2, reset=True, initial=True),
    Case("mamba1", 550, parts=2, reset=True, initial=True),
    Case("longhorn", 550, parts=2, initial=True),
    Case("prism", 19, initial=True, options={"steps": 3}),
    Case("prism", 19, reset=True, initial=True, options={"keys": "previous", "steps": 4, "erase": "channel"}),
    Case("prism", 5, reset=True, initial=True, options={"keys": "previous", "conv_size": 1, "steps": 3}),
    Case("prism", 19, reset=True, initial=True, options={"keys": "convolved", "erase": "head"}),
    Case("prism", 19, reset=True, initial=True, options={"forget": "channel", "steps": 3}),
    Case("prism", 19, reset=True, initial=True, options={"preset": "paper", "qkv_conv": True, "gate": True}),
    Case("delta_product", 19, reset=True, initial=True, options={"householders": 3, "forget_gate": True}),
    Case("mamba2", 19, reset=True, options={"groups": 1, "key_dim": 6}),
    Case("mamba3", 150, parts=2, reset=True, initial=True, options={"key_dim": 6, "groups": 2}),
    Case("mamba3", 4, reset=True, initial=True, options={"key_dim": 4}),
    Case("gated_delta", 4, reset=True, initial=True, options={"conv_size": 1}),
    Case("rwkv6", 6, reset=True, initial=True),
    Case("gla", 8, options={"conv_size": 4}),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The relative errors of every case in each of four processes, which are started once."""
    folder = tmp_path_factory.mktemp("context")
    assert finish(start_children(compare_all, CASES, folder, processes=4)) == [0] * 4
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("case", CASES[: 2 * len(CUT)] + CASES[2 * len(CUT) + len(UNCUT) : -1], ids=str)
def test_parts_equal_the_whole(found: list[dict[str, Any]], case: Case) -> None:
    for rank, errors in enumerate(found[: case.parts]):
        assert not isinstance(errors[str(case)], str), errors[str(case)]
        assert {"y", "x"} < errors[str(case)].keys()
        for name, error in errors[str(case)].items():
            assert error <= (1e-12 if case.double else 2e-5), f"process {rank}: {name} has a relative error of {error}"


@pytest.mark.parametrize("case", CASES[2 * len(CUT) : 2 * len(CUT) + len(UNCUT)], ids=str)
def test_a_rule_that_cannot_be_cut_is_refused_by_all_processes(found: list[dict[str, Any]], case: Case) -> None:
    for errors in found:
        assert f"rule {case.rule!r} cannot share a sequence" in errors[str(case)]
    with torch.device("meta"), pytest.raises(ValueError, match=f"rule '{case.rule}' cannot share a sequence"):
        Mixer(case.rule, 8, 2).check_cut(1000)


def test_the_page_names_the_rules_that_cannot_be_cut() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "many-gpus.md").read_text(encoding="utf-8")
    section = page.partition("### Which rules")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", section)) == set(UNCUT)


def test_parts_shorter_than_a_window_are_refused(found: list[dict[str, Any]]) -> None:
    assert all("has 2 tokens, but a convolution reaches back 3" in errors[str(CASES[-1])] for errors in found)
    for rule, options, fewest in (("gla", {"conv_size": 4}, 3), ("sliding_window", {"window": 9}, 8), ("gla", {}, 1)):
        mixer = Mixer(rule, 8, 2, **options)
        mixer.check_cut(fewest)
        with pytest.raises(ValueError, match=f"needs parts of at least {fewest} tokens"):
            mixer.check_cut(fewest - 1)


class _Alone(Context):
    """One process that holds a whole sequence as its only part."""

    rank, size, first, last = 0, 1, True, True  # type: ignore[assignment]

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]


class Forgetful(Rule):
    """A rule that carries a token without exchanging it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, width, width)
        self.scale = torch.nn.Parameter(torch.ones(width))

    def update(self, x: torch.Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, torch.Tensor], None]:
        written = (x * self.scale)[:, :, None, None]
        return Update(x.unsqueeze(2), written, written), {"token": x[:, -1]}, None

    def output(self, o: torch.Tensor, x: torch.Tensor, extra: None) -> torch.Tensor:
        return o.flatten(2)


def test_a_carry_that_is_not_exchanged_and_padding_are_refused() -> None:
    x = torch.randn(1, 3, 8)
    with pytest.raises(ValueError, match="carries 'token', which it does not exchange"):
        Mixer(Forgetful, 8, 1)(x, context=_Alone(None))
    with pytest.raises(ValueError, match="mask cannot be used with context"):
        Mixer("gla", 8, 1)(x, mask=torch.ones(1, 3, dtype=torch.bool), context=_Alone(None))
    mixer = Mixer("retnet", 8, 1)
    torch.testing.assert_close(mixer(x, context=_Alone(None))[0], mixer(x)[0])


def test_the_kernels_compute_the_map_of_a_part() -> None:
    pytest.importorskip("triton", reason="needs Triton's interpreter: not on macOS")
    mixer, x = Mixer("prism", 32, 2), torch.randn(1, 10, 32)
    start = mixer(torch.randn(1, 5, 32))[1].detach()

    def results(backend: str, context: Context | None) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), start.memory.clone().requires_grad_()]
        y, end = mixer(leaves[0], replace(start, memory=leaves[1]), backend=backend, context=context)
        return [y, end.memory, *torch.autograd.grad(y.sum() + end.memory.sum(), [*leaves, *mixer.parameters()])]

    for got, wanted in zip(results("triton", _Alone(None)), results("torch", None), strict=True):
        assert_close("part", got, wanted, 1e-4)


@pytest.mark.parametrize("erase", [False, True])
def test_in_low_precision_a_part_errs_hardly_more_than_one_call(erase: bool) -> None:
    shape = (1, 200, 2, 16)
    q, k, w, state = (torch.randn(n, dtype=torch.float64) for n in (shape, shape, shape, (1, 2, 16, 16)))
    k, g, beta = (
        F.normalize(k, dim=-1).unsqueeze(3),
        -0.05 * torch.rand(shape[:3]).double(),
        torch.rand(shape[:3]).double(),
    )

    def output(dtype: torch.dtype, context: Context | None) -> torch.Tensor:
        kind = {"erase_strength": beta.to(dtype), "erase_first": True} if erase else {}
        update = Update(
            q.to(dtype), k.to(dtype), w.unsqueeze(3).to(dtype), g.to(torch.promote_types(dtype, torch.float32)), **kind
        )
        return memory(update, state.to(update.state_dtype), context=context)[0]

    exact = output(torch.float64, None)
    assert_close("float64", output(torch.float64, _Alone(None)), exact, 1e-12)
    for dtype in (torch.bfloat16, torch.float16):
        error = relative_error(output(dtype, None), exact)
        assert_close(str(dtype), output(dtype, _Alone(None)), exact, 2 * error)


def test_parts_of_a_sequence_cover_it_in_order() -> None:
    for tokens, size in ((8, 4), (23, 4), (5, 2), (4, 4)):
        places = [type("_", (_Alone,), {"rank": rank, "size": size})(None).part(tokens) for rank in range(size)]
        assert [i for place in places for i in range(tokens)[place]] == list(range(tokens))
        assert max(place.stop - place.start for place in places) - tokens // size <= 1


@pytest.mark.parametrize("forget", [False, True])
def test_the_total_decay_is_what_is_left_of_the_incoming_state(forget: bool) -> None:
    torch.manual_seed(0)
    rate = torch.rand(2, 7, 3, dtype=torch.float64)
    rate[0, 2] = 1.0 if forget else 0.5  # nothing is left
    kind = {"forget": rate} if forget else {"log_decay": -rate}
    mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    for reset in (None, torch.zeros(2, 7, dtype=torch.bool).index_fill(1, torch.tensor(3), True)):
        update = Diagonal(torch.zeros_like(rate), **kind, reset=reset, mask=mask)
        _, left = memory(update, torch.ones(2, 3, dtype=torch.float64))
        torch.testing.assert_close(as_real(total_decay(update, chunk=4)), left)
