"""Requests made from the OpenAPI document of the recommender: no 5xx, and answers as the document says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from schemathesis import GenerationMode

from tests.serve.documented import MODES, check_operation, operations_of
from tests.serve.services import recommender, serving

OPERATIONS = 15
"""Of the document: one that gets lost is noticed."""


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[schemathesis.APIOperation]]:
    with serving(recommender(), tmp_path_factory.mktemp("store") / "s.db") as client:
        yield operations_of(client)


def validate(case: schemathesis.Case) -> None:
    answer = case.call()
    if answer.status_code != 413:  # a list that is too long may be too large as well; schemathesis knows 422 only
        case.validate_response(answer)


@MODES
@pytest.mark.parametrize("number", range(OPERATIONS))
def test_an_operation_answers_as_documented(
    operations: list[schemathesis.APIOperation], number: int, mode: GenerationMode
) -> None:
    assert len(operations) == OPERATIONS
    check_operation(operations[number], mode, validate)
