"""Ids of responses and of their items. An item's id contains the key of its response."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ITEM = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_(i?)[0-9]{1,6}")

_PREFIXES = {
    "compaction": "cmp",
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
    """Return the id of a response.

    Args:
        key: 32 hexadecimal digits.
    """
    return f"resp_{key}"


def output_id(kind: str, key: str, index: int) -> str:
    """Return the id of an output item of a response."""
    return f"{_PREFIXES.get(kind, _OTHER)}_{key}_{index}"


def input_id(kind: str, key: str, index: int) -> str:
    """Return the id of an input item that came without one."""
    return f"{_PREFIXES.get(kind, _OTHER)}_{key}_i{index}"


def owner_of(item_id: object) -> str | None:
    """Return the response in an item's id; None for an id that wasn't made here."""
    found = _ITEM.fullmatch(item_id) if isinstance(item_id, str) else None
    return response_id(found[1]) if found else None


def answer_of(item_id: object) -> str | None:
    """Return the response that an output item belongs to; None for an input item."""
    found = _ITEM.fullmatch(item_id) if isinstance(item_id, str) else None
    return response_id(found[1]) if found and not found[2] else None


def with_id(item: Mapping[str, Any], key: str, index: int) -> dict[str, Any]:
    """Return an input item with an id; its own if it has one."""
    if isinstance(item.get("id"), str) and item["id"]:
        return dict(item)
    kind = item.get("type")
    kind = kind if isinstance(kind, str) else "message"
    return {**item, "type": kind, "id": input_id(kind, key, index)}
