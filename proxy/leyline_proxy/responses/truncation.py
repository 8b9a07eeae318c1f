"""``truncation: auto``: which messages go first where all don't fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Unit = tuple[int, ...]


def droppable(messages: Sequence[Mapping[str, Any]]) -> list[Unit]:
    """What may be dropped, oldest first: each a message, or a call with its results.

    System messages stay, and so does the last unit.
    """
    units: list[list[int]] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "system":
            continue
        if role == "tool" and units:
            # Results without their calls are no conversation.
            units[-1].append(index)
        else:
            units.append([index])
    return [tuple(unit) for unit in units[:-1]]


def with_dropped(body: Mapping[str, Any], units: Sequence[Unit]) -> dict[str, Any]:
    """A chat request that declares that messages are dropped, behind what it declares itself."""
    options = body.get("leyline")
    options = dict(options) if isinstance(options, dict) else {}
    own = options.get("edits")
    drops = [{"message": index, "drop": True} for unit in units for index in unit]
    edits = [*(own if isinstance(own, list) else []), *drops]
    return {**body, "leyline": {**options, "edits": edits}}
