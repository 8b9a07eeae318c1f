"""Responses that are kept for ``previous_response_id``: their form at rest, and lists of items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from .errors import FieldError

_VERSION = b"r1"

MOST_LISTED = 100
_DEFAULT_LISTED = 20


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response, and what was new in its request. The conversation before is the one that led to
    ``previous``."""

    id: str
    session: str
    """Of the proxy's sessions."""
    previous: str | None = None
    input: list[dict[str, Any]] = []
    """The request's own items, as sent, each with an id."""
    response: dict[str, Any] = {}
    """As its client got it."""

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items that it gave."""
        found: list[dict[str, Any]] = self.response.get("output") or []
        return found

    def item(self, identifier: str) -> dict[str, Any] | None:
        """An item by its id."""
        both = (*self.output, *self.input)
        return next((item for item in both if item.get("id") == identifier), None)


def encode(stored: StoredResponse) -> bytes:
    """``stored`` as bytes, with their version."""
    # Not MessagePack: numbers in a client's JSON may be larger than it can hold.
    return _VERSION + msgspec.json.encode(stored)


def decode(raw: bytes) -> StoredResponse | None:
    """What :func:`encode` made; None for bytes of another version, or damaged ones."""
    if not raw.startswith(_VERSION):
        return None
    try:
        return msgspec.json.decode(raw[len(_VERSION) :], type=StoredResponse)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def joined(chain: Sequence[StoredResponse]) -> list[dict[str, Any]]:
    """All items of a conversation.

    Args:
        chain: oldest first.
    """
    return [item for stored in chain for item in (*stored.input, *stored.output)]


def list_items(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of the items that a response was made from.

    Args:
        items: oldest first.
        query: ``after``, ``limit``, ``order``.

    Raises:
        FieldError: names the parameter.
    """
    limit = query.get("limit", str(_DEFAULT_LISTED))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MOST_LISTED:
        raise FieldError("limit", f"limit must be a number from 1 to {MOST_LISTED}.")
    order = _order(query.get("order", "desc"))
    ordered = [*items] if order == "asc" else [*reversed(items)]
    if after := query.get("after"):
        places = [index for index, item in enumerate(ordered) if item.get("id") == after]
        if not places:
            raise FieldError("after", "after must be the id of one of the items.")
        ordered = ordered[places[0] + 1 :]
    page = [_listed(item) for item in ordered[: int(limit)]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }


def _order(value: str) -> Literal["asc", "desc"]:
    if value == "asc":
        return "asc"
    if value == "desc":
        return "desc"
    raise FieldError("order", "order must be asc or desc.")


def _listed(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item as the API lists it: a text alone is a list of one part."""
    content = item.get("content")
    if item.get("type", "message") != "message" or not isinstance(content, str):
        return dict(item)
    spoken = item.get("role") == "assistant"
    part = {"type": "output_text" if spoken else "input_text", "text": content}
    return {**item, "content": [{**part, "annotations": []} if spoken else part]}
