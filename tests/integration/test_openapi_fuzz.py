"""The whole API, by its own description: whatever is sent, no failure of ours and no other shape.

Requests are made by schemathesis from the OpenAPI document, such as keep to it and such as don't,
and sent to a real server.
"""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.core.failures import FailureGroup
from support.claims_engine import ClaimsEngine
from support.examples import is_nightly

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

EXAMPLES = 20
"""Of each route and kind in CI; the nightly run makes as many as its profile says."""

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
SCHEMA = schemathesis.openapi.from_dict(create_app(Settings(), engine_app=ClaimsEngine()).openapi())
OPERATIONS = {
    f"{found.method.upper()} {found.path}": found
    for found in (each.ok() for each in SCHEMA.get_all_operations())
}


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """A running proxy."""
    app = create_app(Settings(log_level="error"), engine_app=ClaimsEngine())
    with serving(app) as found:
        yield found


def kinds() -> Iterator[tuple[str, GenerationMode]]:
    """Each route with requests that keep to it, and with others where anything can be wrong."""
    for route, operation in OPERATIONS.items():
        yield route, GenerationMode.POSITIVE
        if operation.body or operation.query:
            yield route, GenerationMode.NEGATIVE


@pytest.mark.parametrize(("route", "kind"), [*kinds()])
def test_every_route_keeps_to_its_description(
    route: str, kind: GenerationMode, origin: str
) -> None:
    """No request that can be made from the description, or against it, breaks a route."""
    operation = OPERATIONS[route]

    @hypothesis.settings(
        max_examples=200 if is_nightly() else EXAMPLES,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=kind))
    def send(case: schemathesis.Case) -> None:
        answer = case.call(base_url=origin)
        case.validate_response(answer, checks=CHECKS)

    send()


def test_an_answer_that_differs_from_its_description_is_noticed(origin: str) -> None:
    """The checks can fail: against another description the same answer is wrong."""
    document = create_app(Settings(), engine_app=ClaimsEngine()).openapi()
    document["components"]["schemas"]["Alive"]["properties"]["status"] = {"const": "gone"}
    case = schemathesis.openapi.from_dict(document)["/healthz"]["GET"].Case()
    with pytest.raises(FailureGroup):
        case.validate_response(case.call(base_url=origin), checks=CHECKS)


def test_the_description_names_every_route_below_v1(origin: str) -> None:
    """A route that is added without a word about what it takes and gives is noticed."""
    assert len(OPERATIONS) >= 20
    for route, operation in OPERATIONS.items():
        if route.startswith("POST /v1"):
            assert operation.body, f"{route} takes a body that nothing describes"
