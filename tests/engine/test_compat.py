"""A torch that has lost a private name computes the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import prism
from prism.engine import compat
from prism.rules.parts import LowRank, fused_linears

SOURCE = Path(prism.__file__).parent

LOSSES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "transforms": lambda patch: patch.setattr(compat, "TRANSFORMS", "_gone"),
    "dispatch mode": lambda patch: patch.delattr("torch.utils._python_dispatch.is_in_torch_dispatch_mode"),
    "dispatch module": lambda patch: patch.delattr("torch.utils._python_dispatch"),
    "forward level": lambda patch: patch.setattr(compat, "forward_ad", _WithoutLevel),
    "foreach": lambda patch: patch.delattr(torch, "_foreach_copy_"),
    "global hooks": lambda patch: patch.setattr(compat, "GLOBAL_HOOKS", ("_gone",)),
    "forward hooks": lambda patch: patch.setattr(compat, "FORWARD_HOOKS", ("_gone",)),
    "backward hooks": lambda patch: patch.setattr(compat, "BACKWARD_HOOKS", ("_gone",)),
    "registries": lambda patch: patch.setattr(compat, "REGISTRIES", ("_gone",)),
}


class _WithoutLevel:
    """`torch.autograd.forward_ad` as documented: without the private level."""

    unpack_dual = staticmethod(forward_ad.unpack_dual)


def outputs() -> list[Tensor]:
    """A layer's output, gradient, tangent, per-sample gradients and mapped outputs; and copies and products of ours."""
    torch.manual_seed(0)
    mixer, x = prism.Mixer("gated_delta", 16, 2).double(), torch.randn(2, 9, 16, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return mixer(x)[0].square().sum()

    y, _ = mixer(x)
    gradient = torch.func.grad(loss)(x)
    _, tangent = torch.func.jvp(loss, (x,), (torch.ones_like(x),))
    each = torch.func.vmap(torch.func.grad(loss))(x.unsqueeze(1))
    mapped = torch.func.vmap(lambda z: mixer(z)[0])(x.unsqueeze(1))
    places = [torch.zeros(3), torch.zeros(2, 2)]
    compat.copy_all(places, [torch.arange(3.0), torch.ones(2, 2)])
    maps = [nn.Linear(16, 3, bias=False), LowRank(16, 2, 5)]
    return [y, gradient, tangent, each, mapped, *places, *fused_linears(x.float(), *maps)]


@pytest.mark.parametrize("lost", LOSSES)
def test_without_a_private_name_the_numbers_are_the_same(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outputs()
    LOSSES[lost](monkeypatch)
    for got, wanted in zip(outputs(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_transforms_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        seen: list[bool] = []

        def ask(x: Tensor) -> Tensor:
            seen.append(compat.transforms_active(x, None, 3))
            return x.sum()

        x = torch.ones(2, 2)
        torch.func.vmap(ask)(x)
        torch.func.grad(ask)(x)
        torch.func.jvp(ask, (x,), (x,))
        ask(x)
        ask(nn.Parameter(x))
        assert seen == [True, True, True, False, False]

    check()
    LOSSES["transforms"](monkeypatch)
    check()


def test_tangents_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        x = torch.ones(2)
        assert not compat.have_tangents(x, None)
        with forward_ad.dual_level():
            assert compat.have_tangents(None, forward_ad.make_dual(x, x))
            assert not compat.have_tangents(x)

    check()
    LOSSES["forward level"](monkeypatch)
    check()


def test_what_cannot_be_seen_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, hooked = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    assert compat.untouched(plain) and not compat.untouched(hooked)
    assert compat.forward_hooks([plain]) is not None and not any(compat.forward_hooks([plain]) or [1])
    assert any(compat.forward_hooks([plain, hooked]) or [])
    assert not compat.in_dispatch_mode()
    for lost in ("forward hooks", "registries", "dispatch mode"):
        LOSSES[lost](monkeypatch)
    assert not compat.untouched(plain)
    assert compat.forward_hooks([plain]) is None and compat.registries([plain]) is None
    assert compat.in_dispatch_mode()


PRIVATE_FIELDS = {*compat.FORWARD_HOOKS, *compat.BACKWARD_HOOKS, *compat.REGISTRIES}


def private_uses(text: str) -> list[str]:
    """Private torch names that a file imports or reads."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            if (
                re.fullmatch(r"(torch|forward_ad|F|nn|dist|dcp)(\.\w+)*\._[a-z]\w*", chain)
                or node.attr in PRIVATE_FIELDS
            ):
                found.append(chain)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if re.search(r"\._[a-z]", name)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if re.match(r"torch\b.*\._[a-z]", alias.name)]
    return found


def test_private_names_of_torch_are_in_one_file() -> None:
    uses = {
        str(path.relative_to(SOURCE)): private_uses(path.read_text(encoding="utf-8"))
        for path in SOURCE.rglob("*.py")
        if path != Path(compat.__file__)
    }
    assert {path: names for path, names in uses.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._are_functorch_transforms_active()",
        "torch._foreach_copy_(a, b)",
        "forward_ad._current_level",
        "module._forward_hooks",
        "from torch.utils import _pytree",
        "from torch.utils._python_dispatch import is_in_torch_dispatch_mode",
        "import torch._dynamo",
    ],
)
def test_a_private_name_is_seen(line: str) -> None:
    assert private_uses(line)
