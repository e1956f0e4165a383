"""Modules of transformers are as before after every test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _restored_functions() -> Iterator[None]:
    from tests.hf.adapters.bases import FAMILIES, FUNCTIONS, OWN

    names = [f"transformers.models.{family}.modeling_{family}" for family in FAMILIES if family not in OWN]
    before = {name: {f: getattr(sys.modules[name], f) for f in FUNCTIONS} for name in names if name in sys.modules}
    yield
    for name, functions in before.items():
        for function, value in functions.items():
            setattr(sys.modules[name], function, value)
