"""Frames of the Responses API over WebSocket: requests in, events out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from ...request.wire import add_members
from ..fields import FieldError

CREATE = "response.create"
PROCESSED = "response.processed"
"""Codex reports with it that it has read a response; it asks for nothing."""

NOT_HTTP = ("type", "stream_id", "generate")
"""Members of a request that the HTTP route doesn't have."""

_LONGEST_LANE = 256
_LONGEST_MEMBER = 32 * 1024
"""Bytes of a member that is decoded here, in front of the request's own checks."""
_CARRIED = "ws_request_header_"
_HEADERS = ("traceparent", "tracestate")
"""Headers of one request that Codex sends in its ``client_metadata``; others are the
connection's."""
_NOT_FOUND = "previous_response_not_found"
_BAD_REQUEST = 400
_ERROR = b'{"type":"error"'


class _Frame(msgspec.Struct):
    """The members that the connection reads. Others are skipped, however many they are."""

    type: msgspec.Raw = msgspec.Raw()
    stream_id: msgspec.Raw = msgspec.Raw()
    generate: msgspec.Raw = msgspec.Raw()
    client_metadata: msgspec.Raw = msgspec.Raw()


_frame = msgspec.json.Decoder(_Frame)


@dataclass(frozen=True, slots=True)
class Create:
    """A request for a response."""

    body: bytes
    """The body of the same request over HTTP, which streams; besides, :data:`NOT_HTTP`."""
    lane: str | None = None
    """``stream_id``: requests of one lane run in order, lanes side by side."""
    generates: bool = True
    """False if the model isn't asked, and later requests continue from the input."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers in place of the connection's."""


def read_frame(raw: bytes) -> Create | None:
    """Return the request in a client's frame; None if it asks for nothing.

    Raises:
        FieldError: the frame is no event that a client may send.
    """
    try:
        frame = _frame.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise FieldError(
            "", "A frame must be one JSON object, such as a response.create.", code="invalid_json"
        ) from error
    kind = _value(frame.type, "type")
    if kind == PROCESSED:
        return None
    if kind != CREATE:
        raise FieldError("type", f"type must be {CREATE}.", code="unsupported_event")
    lane = _lane(frame.stream_id)
    generates = _value(frame.generate, "generate")
    if generates is not None and not isinstance(generates, bool):
        raise FieldError("generate", "generate must be true or false.")
    return Create(
        # Of members with one name, the last counts.
        add_members(raw, {"stream": b"true"}),
        lane,
        generates is not False,
        _carried(_value(frame.client_metadata, "client_metadata")),
    )


def _lane(raw: msgspec.Raw) -> str | None:
    lane = _value(raw, "stream_id")
    if lane is None or (isinstance(lane, str) and 0 < len(lane) <= _LONGEST_LANE):
        return lane
    raise FieldError(
        "stream_id", f"stream_id must be a text of 1 to {_LONGEST_LANE} characters, or left out."
    )


def error_frame(
    status: int, body: bytes, headers: Mapping[str, str], lane: str | None = None
) -> bytes:
    """Return the event for a request that failed in front of its first event.

    Args:
        body: of the same error over HTTP.
    """
    error = _error_in(body)
    if error.get("code") == _NOT_FOUND:
        status = _BAD_REQUEST  # as OpenAI's servers answer here, and clients expect
    frame: dict[str, Any] = {"type": "error", "status": status, "error": error}
    if headers:
        frame["headers"] = dict(headers)
    if lane is not None:
        frame["stream_id"] = lane
    return orjson.dumps(frame)


def framed(event: bytes) -> bytes:
    """Return an event of a stream as a frame. Only errors differ: here they have a member of their
    own."""
    if not event.startswith(_ERROR):
        return event
    members = orjson.loads(event)
    outer = {name: members.pop(name) for name in ("type", "sequence_number") if name in members}
    return orjson.dumps({**outer, "error": {"type": "server_error", **members}})


def _error_in(body: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = None
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, dict) else {"message": "The request failed."}


def _value(raw: msgspec.Raw, name: str) -> Any:
    if len(memoryview(raw)) > _LONGEST_MEMBER:
        raise FieldError(name, f"{name} has more than {_LONGEST_MEMBER} bytes.")
    try:
        return msgspec.json.decode(raw) if raw else None
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise FieldError(name, f"{name} can't be read.", code="invalid_json") from error


def _carried(metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict):
        return {}
    named = {name: metadata.get(_CARRIED + name) for name in _HEADERS}
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, str) and value.isascii() and value.isprintable()
    }
