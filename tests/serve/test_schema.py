"""Requests made from the OpenAPI document of the recommender: no 5xx, and answers as the document says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import load_all_checks
from schemathesis.config import ProjectConfig, ProjectsConfig, SchemathesisConfig

from tests.serve.services import recommender, serving

load_all_checks()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[schemathesis.BaseSchema]:
    with serving(recommender(), tmp_path_factory.mktemp("store") / "s.db") as client:
        yield schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
def test_the_document_describes_the_service(case: schemathesis.Case) -> None:
    case.call_and_validate()
