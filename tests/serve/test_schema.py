"""Requests made from the OpenAPI document of the recommender: no 5xx, and answers as the document says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.serve.services import recommender, serving

OPERATIONS = 15
"""Of the document: one that gets lost is noticed."""


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[schemathesis.APIOperation]]:
    with serving(recommender(), tmp_path_factory.mktemp("store") / "s.db") as client:
        document = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")
        yield [result.ok() for result in document.get_all_operations()]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("number", range(OPERATIONS))
def test_an_operation_answers_as_documented(
    operations: list[schemathesis.APIOperation], number: int, mode: GenerationMode
) -> None:
    """Requests that fit the document (positive) and requests that do not (negative)."""
    assert len(operations) == OPERATIONS
    operation = operations[number]

    @settings(max_examples=max(4, settings.default.max_examples // 6), suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        answer = case.call()
        if answer.status_code != 413:  # a list that is too long may be too large as well; schemathesis knows 422 only
            case.validate_response(answer)

    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
        pytest.skip("it takes no arguments")
    check()
