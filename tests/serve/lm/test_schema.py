"""Requests made from the OpenAPI document of the language model: no 5xx, and answers as the document says."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from prism.language.chat import DEFAULT_TEMPLATE, TEMPLATE
from tests.serve.documented import MODES, check_operation, operations_of
from tests.serve.lm.models import NAME, folder, serving

OPERATIONS = 17
"""Of the document: one that gets lost is noticed."""


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[schemathesis.APIOperation]]:
    where = tmp_path_factory.mktemp("model") / NAME
    shutil.copytree(folder(), where)
    (where / TEMPLATE).write_text(DEFAULT_TEMPLATE)
    with serving(where, store=where / "store", max_tokens=8, max_prompt=200) as (client, _):
        yield operations_of(client)


def validate(case: schemathesis.Case) -> None:
    answer = case.call()
    # What a document cannot say: limits of this service, and fields that need each other.
    refused = answer.status_code == 400 and answer.json()["error"]["message"]
    case.validate_response(answer, excluded_checks=[positive_data_acceptance] if refused else [])


@MODES
@pytest.mark.parametrize("number", range(OPERATIONS))
def test_an_operation_answers_as_documented(
    operations: list[schemathesis.APIOperation], number: int, mode: GenerationMode
) -> None:
    assert len(operations) == OPERATIONS
    if mode is GenerationMode.NEGATIVE and operations[number].path == "/v1/models/{model}":
        pytest.skip("every path is a name")
    check_operation(operations[number], mode, validate)
