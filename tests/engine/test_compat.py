"""A torch that has lost a private name computes the same; private names of torch and Triton stay in one file each."""

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
from prism.engine import compat, kernels
from prism.engine.recompute import recomputing
from prism.rules.parts import LowRank, fused_linears

SOURCE = Path(prism.__file__).parent

LOSSES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "transforms": lambda patch: patch.setattr(compat, "TRANSFORMS", "_gone"),
    "dispatch mode": lambda patch: patch.delattr("torch.utils._python_dispatch.is_in_torch_dispatch_mode"),
    "exporting": lambda patch: patch.setattr(compat, "EXPORTING", "_gone"),
    "dispatch module": lambda patch: patch.delattr("torch.utils._python_dispatch"),
    "forward level": lambda patch: patch.setattr(compat, "forward_ad", _WithoutLevel),
    "saved tensors": lambda patch: patch.setattr(compat, "SAVED_TENSOR_HOOKS", "_gone"),
    "foreach zero": lambda patch: patch.delattr(torch, "_foreach_zero_"),
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
    """A layer's output, gradient, tangent, per-sample gradients and mapped outputs; also copied tensors and `linears`."""
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
    zeros = [torch.ones(2), torch.ones(3, 1)]
    compat.zero_all(zeros)
    with recomputing():
        y = y + mixer(x)[0]
    maps = [nn.Linear(16, 3, bias=False), LowRank(16, 2, 5)]
    return [y, gradient, tangent, each, mapped, *places, *zeros, *fused_linears(x.float(), *maps)]


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


def test_fallbacks_assume_the_cautious_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, hooked = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    assert compat.is_unmodified(plain) and not compat.is_unmodified(hooked)
    assert compat.forward_hooks([plain]) is not None and not any(compat.forward_hooks([plain]) or [1])
    assert any(compat.forward_hooks([plain, hooked]) or [])
    assert not compat.in_dispatch_mode()
    for lost in ("forward hooks", "registries", "dispatch mode"):
        LOSSES[lost](monkeypatch)
    assert not compat.is_unmodified(plain)
    assert compat.forward_hooks([plain]) is None and compat.registries([plain]) is None
    assert compat.in_dispatch_mode()


def test_a_torch_without_export_is_never_exporting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compat.is_exporting()
    monkeypatch.delattr(torch.compiler, "is_exporting", raising=False)
    assert not compat.is_exporting()


PRIVATE_FIELDS = {*compat.FORWARD_HOOKS, *compat.BACKWARD_HOOKS, *compat.REGISTRIES}


def private_torch(text: str) -> list[str]:
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


PUBLIC_TRITON = {"triton", "triton.jit", "triton.language", "triton.tools.tensor_descriptor"}
PRIVATE_TRITON = {"AsyncCompileMode", "FutureKernel", "arg_names", "warmup", "result", "__dataclass_fields__"}
"""Names that kernels and what Triton compiles from them have. `result` is one of a kernel that is being compiled."""


def private_triton(text: str) -> list[str]:
    """Names outside Triton's public interface that a file of the kernels imports, reads or copies."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            private = re.match(r"triton\.", chain) and chain not in PUBLIC_TRITON
            if private or re.match(r"tl\._", chain) or node.attr in PRIVATE_TRITON or chain.endswith("__dict__.update"):
                found.append(chain)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triton":
            found += [f"{node.module}.{alias.name}" for alias in node.names if node.module not in PUBLIC_TRITON]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "triton"]
            found += [name for name in names if name not in PUBLIC_TRITON]
        elif isinstance(node, ast.Constant) and node.value in PRIVATE_TRITON:
            found.append(str(node.value))  # getattr(kernel, "warmup")
    return found


LIBRARIES: dict[str, tuple[Callable[[str], list[str]], Path]] = {
    "torch": (private_torch, SOURCE),
    "triton": (private_triton, Path(kernels.__file__).parent),  # nothing else imports Triton (pyproject.toml)
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_private_names_of_a_library_are_in_one_file(library: str) -> None:
    private_uses, folder = LIBRARIES[library]
    own = {Path(compat.__file__), Path(kernels.__file__).with_name("compat.py")}
    uses = {
        str(path.relative_to(folder)): private_uses(path.read_text(encoding="utf-8"))
        for path in folder.rglob("*.py")
        if path not in own
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
def test_a_private_name_of_torch_is_seen(line: str) -> None:
    assert private_torch(line)


@pytest.mark.parametrize(
    "line",
    [
        "triton.AsyncCompileMode(threads)",
        "with triton.knobs.compilation.scope(): pass",
        "kernel.warmup(x, grid=(1,))",
        "getattr(kernel, 'arg_names')",
        "pending.result()",
        "descriptor.__dict__.update(template.__dict__)",
        "tl._experimental_descriptor_load(x)",
        "import triton.runtime",
        "from triton.runtime.jit import JITFunction",
        "from triton.backends import compiler",
    ],
)
def test_a_private_name_of_triton_is_seen(line: str) -> None:
    assert private_triton(line)


@pytest.mark.parametrize("line", ["import triton.language as tl", "@triton.jit\ndef f(x):\n    return tl.exp(x)"])
def test_public_names_of_triton_are_allowed(line: str) -> None:
    assert private_triton(line) == []
