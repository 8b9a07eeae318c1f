"""Facts in answers of an upstream that speaks the Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..native import NOTHING_TOLD, Told

_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})


class _Response(msgspec.Struct):
    usage: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    type: str = ""
    response: _Response | None = None


_decoder = msgspec.json.Decoder(_Event)


class NativeResponses:
    """Reads answers to ``/v1/responses``."""

    path = "/v1/responses"

    def passes(self, body: Mapping[str, Any]) -> bool:
        """Return True if a request can go to such an upstream unchanged.

        It must neither be stored nor continue a stored response, because the proxy keeps stored
        responses of tenants apart.
        """
        given = body.get("input")
        items = given if isinstance(given, list) else []
        refers = any(_is_reference(item) or _names_file(item) for item in items)
        goes_on = refers or body.get("previous_response_id") is not None
        return body.get("store") is False and not goes_on

    def usage(self, answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the usage of a whole answer, as a chat completion counts it."""
        return _usage(answer.get("usage"))

    def told(self, data: bytes) -> Told:
        """Return the facts of an event's data."""
        try:
            event = _decoder.decode(data)
        except msgspec.DecodeError:
            return NOTHING_TOLD
        if event.type.endswith(".delta"):
            return Told(bears_token=True)
        if event.type in _ENDS:
            usage = _usage(event.response.usage) if event.response is not None else None
            return Told(usage=usage, finishes=event.type != "response.failed")
        return NOTHING_TOLD


def _is_reference(item: object) -> bool:
    """Return True if an input item refers to a stored one; its type may be left out."""
    if not isinstance(item, Mapping):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def _names_file(item: object) -> bool:
    """Return True if a part of an item names an uploaded file, with or without its data."""
    if not isinstance(item, Mapping):
        return False
    lists = [value for name in ("content", "output") if isinstance(value := item.get(name), list)]
    parts = [part for each in lists for part in each]
    return any(isinstance(part, Mapping) and "file_id" in part for part in parts)


def _usage(usage: object) -> Mapping[str, Any] | None:
    if not isinstance(usage, Mapping):
        return None
    return {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
        "prompt_tokens_details": usage.get("input_tokens_details"),
    }
