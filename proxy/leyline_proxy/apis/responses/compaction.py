"""Compaction items: summaries that clients carry, and that stand in place of the items before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...model.compaction import Compacted, is_foreign
from ...model.fields import OPTIONS_FIELD
from ..fields import FieldError
from .items import COMPACTION, TOOLS_ITEM, Placed, kind_of

TRIGGER = "compaction_trigger"
"""Type of an item that asks for a compaction. It is the last one."""

_FOREIGN = {
    "role": "user",
    "content": f"[{COMPACTION}] A summary of what came before is encrypted by another provider and "
    "can't be read here.",
}
"""The message in place of a summary of another provider's."""

CONTEXT = "context_management"
_ENTRY = frozenset({"type", "compact_threshold"})

Opens = Callable[[str], Compacted | None]
"""Opens an ``encrypted_content``; returns None if it can't."""


def compaction_item(item_id: str, carried: str) -> dict[str, Any]:
    """Return a compaction item."""
    return {"type": COMPACTION, "id": item_id, "encrypted_content": carried}


def unfolded(items: Sequence[Placed], opens: Opens) -> list[Placed]:
    """Return the items with the last compaction opened, and without those that it covers.

    Instructions and offers of tools stay. So do messages of the user if nothing else comes before
    the compaction: the client has chosen them, or has them from ``/v1/responses/compact``.
    Otherwise those that the compaction carries take their place. A compaction of another provider
    replaces nothing: a message says that it can't be read.

    Raises:
        FieldError: the compaction can't be opened.
    """
    kinds = [kind_of(item) for item in items]
    shown = [_shown(kind, item) for kind, item in zip(kinds, items, strict=True)]
    own = [number for number, kind in enumerate(kinds) if kind == COMPACTION and not shown[number]]
    if not own:
        return [new or item for new, item in zip(shown, items, strict=True)]
    last = own[-1]
    compacted = _opened(items[last], opens)
    roles = [_role(kind, item) for kind, item in zip(kinds[:last], items, strict=False)]
    chosen = "user" in roles and None not in roles
    stay = ("instructions", "user") if chosen else ("instructions",)
    front = [item for item, role in zip(items, roles, strict=False) if role in stay]
    messages = replace(compacted, kept=()).messages() if chosen else compacted.messages()
    opened = Placed({"type": COMPACTION, "messages": messages}, items[last].origin)
    rest = zip(shown[last + 1 :], items[last + 1 :], strict=True)
    return [*front, opened, *(new or item for new, item in rest)]


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


def _shown(kind: str, item: Placed) -> Placed | None:
    """Return the item in place of a compaction of another provider; None for any other item."""
    carried = item.value.get("encrypted_content")
    if kind != COMPACTION or not isinstance(carried, str) or not is_foreign(carried):
        return None
    return Placed({"type": COMPACTION, "messages": (_FOREIGN,)}, item.origin)


def _opened(item: Placed, opens: Opens) -> Compacted:
    carried = item.value.get("encrypted_content")
    compacted = opens(carried) if isinstance(carried, str) else None
    if compacted is None:
        field = f"{item.origin}.encrypted_content"
        raise FieldError(
            field,
            f"{field} isn't a compaction of this proxy for this tenant and model, or it was "
            "changed.",
            code="invalid_encrypted_content",
        )
    return compacted


def _role(kind: str, item: Placed) -> str | None:
    """Return the role of an item in front of a compaction; None for the model's, for results of its
    calls, and for an earlier compaction."""
    if kind == TOOLS_ITEM:
        return "instructions"
    role = item.value.get("role") if kind == "message" else None
    return "instructions" if role in ("system", "developer") else "user" if role == "user" else None
