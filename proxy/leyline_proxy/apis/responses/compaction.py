"""Compaction items: summaries that clients carry, and that stand in place of the items before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...model.compaction import Compacted
from ...model.fields import OPTIONS_FIELD
from .errors import FieldError
from .items import COMPACTION, TOOLS_ITEM, Placed, kind_of

TRIGGER = "compaction_trigger"
"""Type of an item that asks for a compaction. It is the last one."""

CONTEXT = "context_management"
_ENTRY = frozenset({"type", "compact_threshold"})

Opens = Callable[[str], Compacted | None]
"""Opens an ``encrypted_content``; returns None if it can't."""


def compaction_item(item_id: str, carried: str) -> dict[str, Any]:
    """Return a compaction item."""
    return {"type": COMPACTION, "id": item_id, "encrypted_content": carried}


def unfolded(items: Sequence[Placed], opens: Opens) -> list[Placed]:
    """Return the items with the last compaction opened, and without those that it covers.

    Instructions at the front stay, and so do offers of tools.

    Raises:
        FieldError: the compaction can't be opened.
    """
    kinds = [kind_of(item) for item in items]
    if COMPACTION not in kinds:
        return list(items)
    last = len(kinds) - 1 - kinds[::-1].index(COMPACTION)
    place, carried = items[last].origin, items[last].value.get("encrypted_content")
    compacted = opens(carried) if isinstance(carried, str) else None
    if compacted is None:
        field = f"{place}.encrypted_content"
        raise FieldError(
            field,
            f"{field} isn't a compaction of this proxy for this tenant and model, or it was "
            "changed.",
            code="invalid_encrypted_content",
        )
    opened = Placed({"type": COMPACTION, "messages": compacted.messages()}, place)
    front = next((i for i in range(last) if not _is_instruction(kinds[i], items[i])), last)
    tools = [items[i] for i in range(front, last) if kinds[i] == TOOLS_ITEM]
    return [*items[:front], *tools, opened, *items[last + 1 :]]


def ends_with_trigger(items: Sequence[Placed]) -> bool:
    """Return True if the last item asks for a compaction.

    Raises:
        FieldError: another one does.
    """
    for number, item in enumerate(items):
        if kind_of(item) == TRIGGER and number < len(items) - 1:
            raise FieldError(item.origin, f"{item.origin}: a {TRIGGER} must be the last item.")
    return bool(items) and kind_of(items[-1]) == TRIGGER


def options_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat members for the list ``context_management``; none if it isn't a list.

    Raises:
        FieldError: an entry is wrong; the error names the field.
    """
    entries = body.get(CONTEXT)
    if not isinstance(entries, list) or not entries:
        return {}
    if len(entries) > 1:
        raise FieldError(f"{CONTEXT}[1]", f"{CONTEXT} may hold one entry.")
    entry, place = entries[0], f"{CONTEXT}[0]"
    if not isinstance(entry, dict) or entry.get("type") != COMPACTION:
        raise FieldError(f"{place}.type", f"{place}.type must be {COMPACTION}.")
    if unknown := entry.keys() - _ENTRY:
        raise FieldError(place, f"{place} has no field {min(unknown)[:80]!r}.")
    least = entry.get("compact_threshold")
    if least is not None and (not isinstance(least, int) or isinstance(least, bool) or least < 1):
        field = f"{place}.compact_threshold"
        raise FieldError(field, f"{field} must be a number of tokens, 1 or more.")
    options = body.get(OPTIONS_FIELD)
    if options is not None and not isinstance(options, dict):
        return {}
    if options and options.get("compact") is not None:
        field = f"{OPTIONS_FIELD}.compact"
        raise FieldError(field, f"{field} and {CONTEXT} both ask for a compaction.")
    return {OPTIONS_FIELD: {**(options or {}), "compact": {"threshold_tokens": least}}}


def _is_instruction(kind: str, item: Placed) -> bool:
    told = kind == "message" and item.value.get("role") in ("system", "developer")
    return told or kind == TOOLS_ITEM
