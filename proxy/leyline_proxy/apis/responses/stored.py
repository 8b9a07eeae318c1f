"""List the items of stored responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...model.stored_response import StoredResponse
from ..fields import FieldError

MOST_LISTED = 100
_DEFAULT_LISTED = 20


def joined(chain: Sequence[StoredResponse]) -> list[dict[str, Any]]:
    """Return all items of a conversation.

    Args:
        chain: responses, oldest first.
    """
    return [item for stored in chain for item in (*stored.input, *stored.output)]


def users(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the user's messages among items, as an answer lists them."""
    found = (item for item in items if item.get("type", "message") == "message")
    return [
        {**_listed(item), "status": "completed"} for item in found if item.get("role") == "user"
    ]


def list_items(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of the input items of a response.

    Args:
        items: oldest first.
        query: ``after``, ``limit``, ``order``.

    Raises:
        FieldError: a parameter is wrong; the error names it.
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
    """Return an item as the API lists it: a single text becomes a list of one part."""
    content = item.get("content")
    if item.get("type", "message") != "message" or not isinstance(content, str):
        return dict(item)
    spoken = item.get("role") == "assistant"
    part = {"type": "output_text" if spoken else "input_text", "text": content}
    return {**item, "content": [{**part, "annotations": []} if spoken else part]}
