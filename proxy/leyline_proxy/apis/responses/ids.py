"""Ids of responses and of their items: an item's says which response it belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ITEM = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_(i?)[0-9]{1,6}")

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "cto",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lso",
}
_OTHER = "item"


def response_id(key: str) -> str:
    """The id of a response.

    Args:
        key: 32 hexadecimal digits.
    """
    return f"resp_{key}"


def output_id(kind: str, key: str, index: int) -> str:
    """The id of an item that a response gave."""
    return f"{_PREFIXES.get(kind, _OTHER)}_{key}_{index}"


def input_id(kind: str, key: str, index: int) -> str:
    """The id of an item that a response was given without one."""
    return f"{_PREFIXES.get(kind, _OTHER)}_{key}_i{index}"


def owner_of(item_id: object) -> str | None:
    """The response that an item's id was made for; None for an id that wasn't made here."""
    found = _ITEM.fullmatch(item_id) if isinstance(item_id, str) else None
    return response_id(found[1]) if found else None


def answer_of(item_id: object) -> str | None:
    """The response that gave an item; None for one that a response was given."""
    found = _ITEM.fullmatch(item_id) if isinstance(item_id, str) else None
    return response_id(found[1]) if found and not found[2] else None


def with_id(item: Mapping[str, Any], key: str, index: int) -> dict[str, Any]:
    """An input item with an id, its own where it has one."""
    if isinstance(item.get("id"), str) and item["id"]:
        return dict(item)
    kind = item.get("type")
    kind = kind if isinstance(kind, str) else "message"
    return {**item, "type": kind, "id": input_id(kind, key, index)}
