"""Requests made from an OpenAPI document, for the tests of both services."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import schemathesis
from httpx import Client
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

MODES = pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
"""Requests that fit the document (positive) and requests that do not (negative)."""


def operations_of(client: Client) -> list[schemathesis.APIOperation]:
    """The operations in the document of a running service."""
    document = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")
    return [result.ok() for result in document.get_all_operations()]


def check_operation(
    operation: schemathesis.APIOperation, mode: GenerationMode, validate: Callable[[schemathesis.Case], None]
) -> None:
    """Make requests of one operation; `validate` sends one and compares the answer with the document."""
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
        pytest.skip("it takes no arguments")

    @settings(max_examples=max(4, settings.default.max_examples // 6), suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        validate(case)

    check()
