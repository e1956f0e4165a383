"""Deprecations of torch, transformers and Triton are errors in these tests; noise of other libraries is not."""

from __future__ import annotations

import warnings

import pytest

CATEGORIES = [DeprecationWarning, PendingDeprecationWarning, FutureWarning]


def warn(message: str, category: type[Warning], module: str) -> None:
    """As if `module` were to blame, which is what the stack level of a warning decides."""
    warnings.warn_explicit(message, category, f"{module}.py", 1, module=module, registry={})


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("library", ["torch", "transformers", "triton"])
@pytest.mark.parametrize("blamed", ["library", "prism.nn.mixer", "prism", "test_loop", "tests.train.test_loop"])
def test_a_deprecation_is_an_error(category: type[Warning], library: str, blamed: str) -> None:
    module = f"{library}.cuda.amp" if blamed == "library" else blamed
    with pytest.raises(category):
        warn(f"since the last version\n`{library}.thing` is deprecated", category, module)


@pytest.mark.parametrize("category", [DeprecationWarning, PendingDeprecationWarning])
@pytest.mark.parametrize(
    ("message", "module"),
    [
        ("torch.jit.script is deprecated", "fla.ops"),
        ("ast.Num is deprecated", "triton.compiler"),
        ("old", "numpy.lib"),
    ],
)
def test_noise_is_none(category: type[Warning], message: str, module: str) -> None:
    with warnings.catch_warnings(record=True):  # keeps the filters
        warn(message, category, module)


def test_a_warning_of_another_kind_is_none() -> None:
    with warnings.catch_warnings(record=True):
        warn("torch is slow", UserWarning, "torch.nn")


def test_torch_using_its_own_old_parts_is_none() -> None:
    with warnings.catch_warnings(record=True):
        warn("`torch.jit.script` is deprecated", DeprecationWarning, "torch.jit._script")
