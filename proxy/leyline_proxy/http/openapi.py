"""The OpenAPI document: the routes' inputs and outputs that the proxy itself defines.

Members that the proxy leaves to the engine are neither listed nor forbidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ..claims.documents import ClaimBody, RevisionBody
from ..request.side_bodies import ProofBody, QuarantineBody, RecallBody

_REF = "#/components/schemas/{name}"

Schema = Mapping[str, Any]


def _object(optional: Mapping[str, Schema] | None = None, **required: Schema) -> Schema:
    """Return the schema of an object that may have other members, too."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _nullable(kind: str, **bounds: Any) -> Schema:
    return {"type": [kind, "null"], **bounds}


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}


STRING: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
ANYTHING: Schema = {"type": "object"}

_NO_STRING = _nullable("string")
_NO_COUNT = _nullable("integer", minimum=0)
_NO_BOOLEAN = _nullable("boolean")
_ROLES = ["system", "developer", "user", "assistant", "tool", "function"]
_MODEL: Schema = {**STRING, "minLength": 1}
_STRINGS, _OBJECTS = _list(STRING), _list(ANYTHING)

_PART: dict[str, Schema] = {
    "role": STRING,
    "tool": STRING,
    "tokens": COUNT,
    "tags": _STRINGS,
    "policy": STRING,
    "turn": STRING,
    "index": COUNT,
    "created": NUMBER,
}
_DERIVED = _object(
    span=STRING, message=_NO_COUNT, role=STRING, read={"enum": ["direct", "transitive", "unknown"]}
)
_LEDGER_SPAN = _object(
    span=STRING,
    message=_NO_COUNT,
    role=_NO_STRING,
    tokens=_NO_COUNT,
    state={"enum": ["held", "edited", "forgotten", "quarantined", "gone"]},
    since=_NO_COUNT,
    until=_NO_COUNT,
    read_by=_list(_object(**{"turn": STRING, "from": COUNT})),
    engines=_list(
        _object(**{"engine": STRING, "turns": _NO_COUNT, "lineages": _NO_COUNT, "from": _NO_COUNT})
    ),
)
_LEDGER_ENGINE = _object(
    engine=STRING,
    answer={"enum": ["given", "unreachable", "unsupported", "gone"]},
    pending=_NO_COUNT,
    owed=BOOLEAN,
)
_RECALLED = _object(
    {"text": STRING, **_PART},
    selector=STRING,
    verdict={"enum": ["hit", "fault", "recompute", "refuse", "abstain"]},
    cause=_NO_STRING,
    address=_NO_STRING,
    tokens=COUNT,
    price_tokens=COUNT,
)

SCHEMAS: dict[str, Schema] = {
    "Error": _object(
        error=_object(
            message=STRING,
            type=STRING,
            param=_NO_STRING,
            code={"type": ["string", "integer", "null"]},
        )
    ),
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=STRING, message=STRING)),
    "ChatRequest": _object(
        {"stream": _NO_BOOLEAN, "tools": {"type": ["array", "null"], "items": ANYTHING}},
        model=_MODEL,
        messages={**_list(_object({"content": {}}, role={"enum": _ROLES})), "minItems": 1},
    ),
    "ChatCompletion": _object(choices=_OBJECTS),
    "CompletionRequest": _object({"prompt": {}, "stream": _NO_BOOLEAN}, model=_MODEL),
    "MessageRequest": _object(
        {"system": {}, "stream": _NO_BOOLEAN, "tools": _OBJECTS, "thinking": ANYTHING},
        model=_MODEL,
        max_tokens=COUNT,
        messages={
            **_list(_object(role={"enum": ["user", "assistant"]}, content={})),
            "minItems": 1,
        },
    ),
    "Message": _object(
        id=STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        model=STRING,
        content=_OBJECTS,
        stop_reason=_NO_STRING,
        usage=_object(input_tokens=COUNT, output_tokens=COUNT),
    ),
    "ResponseRequest": _object(
        {
            "input": {"type": ["string", "array"]},
            "instructions": _NO_STRING,
            "previous_response_id": _NO_STRING,
            "stream": _NO_BOOLEAN,
            "store": _NO_BOOLEAN,
            "tools": _OBJECTS,
        },
        model=_MODEL,
    ),
    "Response": _object(id=STRING, object={"const": "response"}, status=STRING, output=_OBJECTS),
    "CompactedResponse": _object(
        id=STRING, object={"const": "response.compaction"}, output=_OBJECTS
    ),
    "Models": _object(data=_list(_object(id=STRING))),
    "Counted": _object({"context_management": ANYTHING}, input_tokens=COUNT),
    "Budgets": _object(budgets=_OBJECTS, complete=BOOLEAN),
    "SessionOverview": _object(
        id=STRING,
        name=STRING,
        model=STRING,
        client=STRING,
        turns=COUNT,
        updated=NUMBER,
        prompt_tokens=COUNT,
        cached_tokens=COUNT,
        spliced_tokens=COUNT,
        reused_tokens=COUNT,
        hit_ratio=_nullable("number", minimum=0, maximum=1),
    ),
    "Sessions": _object(sessions=_list(_ref("SessionOverview"))),
    "Session": {"allOf": [_ref("SessionOverview"), _object(retained=_STRINGS, history=_OBJECTS)]},
    "Quarantined": _object(
        {"derived_omitted": COUNT},
        session=STRING,
        quarantined=_list(_object(span=STRING, message=_nullable("integer"))),
        forgot=_object(result={"enum": ["erased", "owed", "unreachable"]}, owed=COUNT),
        responses_deleted=COUNT,
        derived={**_list(_DERIVED), "maxItems": 256},
        derived_complete=BOOLEAN,
    ),
    "Proof": _object(
        session=STRING,
        tenant=STRING,
        spans=_STRINGS,
        time=STRING,
        verdict={"enum": ["clean", "survivors", "not_proven"]},
        unreachable=BOOLEAN,
        engines=_OBJECTS,
        places=_OBJECTS,
        responses=_object(held=_NO_COUNT, deleted=COUNT),
        stays=_STRINGS,
        key=_NO_STRING,
        signature=_NO_STRING,
    ),
    "Ledger": _object(
        session=STRING,
        spans=_list(_LEDGER_SPAN),
        total=COUNT,
        truncated=BOOLEAN,
        engines=_list(_LEDGER_ENGINE),
    ),
    "Recalled": _object(session=STRING, pieces=_list(_RECALLED)),
    "Parts": _object(session=STRING, count=COUNT, parts=_list(_object(address=STRING, **_PART))),
    "Claim": _object(
        id=STRING,
        session=STRING,
        kind=STRING,
        state=STRING,
        cause=STRING,
        age_s={**NUMBER, "minimum": 0},
        expires_in_s=_nullable("number"),
        resident_tokens=COUNT,
        required_tokens=COUNT,
        hits=COUNT,
        pressure=COUNT,
    ),
    "Claims": _object(claims=_list(_ref("Claim"))),
    "ClaimEvents": _object(events=_OBJECTS, seq=COUNT),
    "Ready": _object(ready=BOOLEAN, upstreams=_OBJECTS),
    "Alive": _object(status={"const": "ok"}),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """Schema names of one route's input and output. Every route may also answer with an error."""

    gives: str | None = None
    """Name of the answer's schema; None if no schema describes it."""
    takes: str | None = None
    streams: bool = False
    """True if the route answers with events when the request asks for a stream."""
    status: int = 200
    error: str = "Error"
    also: Mapping[int, str] | None = None
    """Schemas of answers with other statuses that are no errors."""


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("post", "/v1/chat/completions"): Operation("ChatCompletion", "ChatRequest", streams=True),
    ("post", "/v1/completions"): Operation("ChatCompletion", "CompletionRequest", streams=True),
    ("get", "/v1/models"): Operation("Models"),
    ("post", "/v1/responses"): Operation("Response", "ResponseRequest", streams=True),
    ("post", "/v1/responses/compact"): Operation("CompactedResponse", "ResponseRequest"),
    ("post", "/v1/responses/input_tokens"): Operation("Counted", "ResponseRequest"),
    ("post", "/v1/messages"): Operation(
        "Message", "MessageRequest", streams=True, error="AnthropicError"
    ),
    ("post", "/v1/messages/count_tokens"): Operation(
        "Counted", "MessageRequest", error="AnthropicError"
    ),
    ("post", "/v1/leyline/count_tokens"): Operation("Counted", "ChatRequest"),
    ("get", "/v1/leyline/budgets"): Operation("Budgets"),
    ("get", "/v1/leyline/sessions"): Operation("Sessions"),
    ("get", "/v1/leyline/sessions/{session_id}"): Operation("Session"),
    ("post", "/v1/leyline/sessions/{session_id}/quarantine"): Operation(
        "Quarantined", "QuarantineBody"
    ),
    ("post", "/v1/leyline/sessions/{session_id}/proof"): Operation("Proof", "ProofBody"),
    ("get", "/v1/leyline/sessions/{session_id}/ledger"): Operation("Ledger"),
    ("post", "/v1/leyline/sessions/{session_id}/recall"): Operation("Recalled", "RecallBody"),
    ("get", "/v1/leyline/sessions/{session_id}/parts"): Operation("Parts"),
    ("post", "/v1/leyline/claims"): Operation("Claim", "ClaimBody", status=201),
    ("get", "/v1/leyline/claims"): Operation("Claims"),
    ("get", "/v1/leyline/claims/{claim_id}"): Operation("Claim"),
    ("patch", "/v1/leyline/claims/{claim_id}"): Operation("Claim", "RevisionBody"),
    ("delete", "/v1/leyline/claims/{claim_id}"): Operation("Claim"),
    ("get", "/v1/leyline/claims/{claim_id}/events"): Operation("ClaimEvents"),
    ("get", "/healthz"): Operation("Alive"),
    ("get", "/readyz"): Operation("Ready", also={503: "Ready"}),
}


def describe(app: FastAPI) -> None:
    """Make ``app`` return this document for its routes; built at the first request for it."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's own way to do this


def _document(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes
    )
    _, bodies = msgspec.json.schema_components(
        (ClaimBody, RevisionBody, QuarantineBody, ProofBody, RecallBody),
        ref_template=_REF.format(name="{name}"),
    )
    found.setdefault("components", {})["schemas"] = {**SCHEMAS, **bodies}
    found["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "A tenant's API key."}
    }
    found["security"] = [{"key": []}, {}]
    for path, methods in found["paths"].items():
        for method, described in methods.items():
            _fill(described, OPERATIONS.get((method, path), Operation()))
    return found


def _fill(described: dict[str, Any], operation: Operation) -> None:
    if operation.takes is not None:
        content = {"application/json": {"schema": _ref(operation.takes)}}
        described["requestBody"] = {"required": True, "content": content}
    answers: dict[str, Any] = {}
    given = {operation.status: operation.gives, **(operation.also or {})}
    for status, name in given.items():
        answers[str(status)] = {"description": "Done."} | _content(name, operation.streams)
    answers["default"] = {"description": "An error."} | _content(operation.error, streams=False)
    described["responses"] = answers


def _content(name: str | None, streams: bool) -> dict[str, Any]:
    if name is None:
        return {}
    content: dict[str, Any] = {"application/json": {"schema": _ref(name)}}
    if streams:
        content["text/event-stream"] = {"schema": STRING}
    return {"content": content}
