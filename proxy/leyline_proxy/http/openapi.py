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


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object that may have other members, too."""
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
    }


def _nullable(kind: str, **bounds: Any) -> Schema:
    return {"type": [kind, "null"], **bounds}


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}


STRING: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
ANYTHING: Schema = {"type": "object"}

_ROLES = ["system", "developer", "user", "assistant", "tool", "function"]
_MODEL: Schema = {**STRING, "minLength": 1}
_STREAM: Schema = {"type": ["boolean", "null"]}
_OBJECTS: Schema = {"type": "array", "items": ANYTHING}

_DERIVED: Schema = {
    "type": "array",
    "maxItems": 256,
    "items": _object(
        {
            "span": STRING,
            "message": _nullable("integer", minimum=0),
            "role": STRING,
            "read": {"enum": ["direct", "transitive", "unknown"]},
        }
    ),
}

_PART: dict[str, Schema] = {
    "role": STRING,
    "tool": STRING,
    "tokens": COUNT,
    "tags": {"type": "array", "items": STRING},
    "policy": STRING,
    "turn": STRING,
    "index": COUNT,
    "created": NUMBER,
}

SCHEMAS: dict[str, Schema] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": STRING,
                    "type": STRING,
                    "param": _nullable("string"),
                    "code": {"type": ["string", "integer", "null"]},
                }
            )
        }
    ),
    "AnthropicError": _object(
        {
            "type": {"const": "error"},
            "error": _object({"type": STRING, "message": STRING}),
        }
    ),
    "ChatRequest": _object(
        {
            "model": _MODEL,
            "messages": {
                "type": "array",
                "minItems": 1,
                "items": _object({"role": {"enum": _ROLES}}, {"content": {}}),
            },
        },
        {"stream": _STREAM, "tools": {"type": ["array", "null"], "items": ANYTHING}},
    ),
    "ChatCompletion": _object({"choices": _OBJECTS}),
    "CompletionRequest": _object({"model": _MODEL}, {"prompt": {}, "stream": _STREAM}),
    "MessageRequest": _object(
        {
            "model": _MODEL,
            "max_tokens": {"type": "integer", "minimum": 0},
            "messages": {
                "type": "array",
                "minItems": 1,
                "items": _object({"role": {"enum": ["user", "assistant"]}, "content": {}}),
            },
        },
        {"system": {}, "stream": _STREAM, "tools": _OBJECTS, "thinking": ANYTHING},
    ),
    "Message": _object(
        {
            "id": STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": STRING,
            "content": _OBJECTS,
            "stop_reason": _nullable("string"),
            "usage": _object({"input_tokens": COUNT, "output_tokens": COUNT}),
        }
    ),
    "ResponseRequest": _object(
        {"model": _MODEL},
        {
            "input": {"type": ["string", "array"]},
            "instructions": _nullable("string"),
            "previous_response_id": _nullable("string"),
            "stream": _STREAM,
            "store": {"type": ["boolean", "null"]},
            "tools": _OBJECTS,
        },
    ),
    "Response": _object(
        {"id": STRING, "object": {"const": "response"}, "status": STRING, "output": _OBJECTS}
    ),
    "CompactedResponse": _object(
        {"id": STRING, "object": {"const": "response.compaction"}, "output": _OBJECTS}
    ),
    "Models": _object({"data": {"type": "array", "items": _object({"id": STRING})}}),
    "Counted": _object({"input_tokens": COUNT}, {"context_management": ANYTHING}),
    "Budgets": _object({"budgets": _OBJECTS, "complete": {"type": "boolean"}}),
    "SessionOverview": _object(
        {
            "id": STRING,
            "name": STRING,
            "model": STRING,
            "client": STRING,
            "turns": COUNT,
            "updated": NUMBER,
            "prompt_tokens": COUNT,
            "cached_tokens": COUNT,
            "spliced_tokens": COUNT,
            "reused_tokens": COUNT,
            "hit_ratio": _nullable("number", minimum=0, maximum=1),
        }
    ),
    "Sessions": _object({"sessions": {"type": "array", "items": _ref("SessionOverview")}}),
    "Session": {
        "allOf": [
            _ref("SessionOverview"),
            _object({"retained": {"type": "array", "items": STRING}, "history": _OBJECTS}),
        ]
    },
    "Quarantined": _object(
        {
            "session": STRING,
            "quarantined": {
                "type": "array",
                "items": _object({"span": STRING, "message": _nullable("integer")}),
            },
            "forgot": _object(
                {"result": {"enum": ["erased", "owed", "unreachable"]}, "owed": COUNT}
            ),
            "responses_deleted": COUNT,
            "derived": _DERIVED,
            "derived_complete": {"type": "boolean"},
        },
        {"derived_omitted": COUNT},
    ),
    "Proof": _object(
        {
            "session": STRING,
            "tenant": STRING,
            "spans": {"type": "array", "items": STRING},
            "time": STRING,
            "verdict": {"enum": ["clean", "survivors", "not_proven"]},
            "unreachable": {"type": "boolean"},
            "engines": _OBJECTS,
            "places": _OBJECTS,
            "responses": _object({"held": _nullable("integer", minimum=0), "deleted": COUNT}),
            "stays": {"type": "array", "items": STRING},
            "key": _nullable("string"),
            "signature": _nullable("string"),
        }
    ),
    "Ledger": _object(
        {
            "session": STRING,
            "spans": {
                "type": "array",
                "items": _object(
                    {
                        "span": STRING,
                        "message": _nullable("integer", minimum=0),
                        "role": _nullable("string"),
                        "tokens": _nullable("integer", minimum=0),
                        "state": {"enum": ["held", "edited", "forgotten", "quarantined", "gone"]},
                        "since": _nullable("integer", minimum=0),
                        "until": _nullable("integer", minimum=0),
                        "read_by": {
                            "type": "array",
                            "items": _object({"turn": STRING, "from": COUNT}),
                        },
                        "engines": {
                            "type": "array",
                            "items": _object(
                                {
                                    "engine": STRING,
                                    "turns": _nullable("integer", minimum=0),
                                    "lineages": _nullable("integer", minimum=0),
                                    "from": _nullable("integer", minimum=0),
                                }
                            ),
                        },
                    }
                ),
            },
            "total": COUNT,
            "truncated": {"type": "boolean"},
            "engines": {
                "type": "array",
                "items": _object(
                    {
                        "engine": STRING,
                        "answer": {"enum": ["given", "unreachable", "unsupported", "gone"]},
                        "pending": _nullable("integer", minimum=0),
                        "owed": {"type": "boolean"},
                    }
                ),
            },
        }
    ),
    "Recalled": _object(
        {
            "session": STRING,
            "pieces": {
                "type": "array",
                "items": _object(
                    {
                        "selector": STRING,
                        "verdict": {"enum": ["hit", "fault", "recompute", "refuse", "abstain"]},
                        "cause": _nullable("string"),
                        "address": _nullable("string"),
                        "tokens": COUNT,
                        "price_tokens": COUNT,
                    },
                    {"text": STRING, **_PART},
                ),
            },
        }
    ),
    "Parts": _object(
        {
            "session": STRING,
            "count": COUNT,
            "parts": {"type": "array", "items": _object({"address": STRING, **_PART})},
        }
    ),
    "Claim": _object(
        {
            "id": STRING,
            "session": STRING,
            "kind": STRING,
            "state": STRING,
            "cause": STRING,
            "age_s": {**NUMBER, "minimum": 0},
            "expires_in_s": _nullable("number"),
            "resident_tokens": COUNT,
            "required_tokens": COUNT,
            "hits": COUNT,
            "pressure": COUNT,
        }
    ),
    "Claims": _object({"claims": {"type": "array", "items": _ref("Claim")}}),
    "ClaimEvents": _object({"events": _OBJECTS, "seq": COUNT}),
    "Ready": _object({"ready": {"type": "boolean"}, "upstreams": _OBJECTS}),
    "Alive": _object({"status": {"const": "ok"}}),
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
