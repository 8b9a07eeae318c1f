"""``truncation: auto``: the order in which messages are dropped to make the rest fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leyline_policies.conversation import nth_last
from leyline_policies.verbs import is_forgotten

from ...model.messages import Message, call_ids

Unit = tuple[int, ...]


def droppable(messages: Sequence[Message]) -> list[Unit]:
    """Return the units that may be dropped, oldest first: each a message, or a call with results.

    System messages stay, and so do the user's last message and the last unit.
    """
    units: list[list[int]] = []
    called: dict[object, list[int]] = {}
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "system":
            continue
        if role == "tool" and units:
            # Results need their calls.
            called.get(message.get("tool_call_id"), units[-1]).append(index)
            continue
        units.append([index])
        called.update(dict.fromkeys(call_ids(message), units[-1]))
    last_user = nth_last(messages, "user", 1)
    return [tuple(unit) for unit in units[:-1] if last_user not in unit]


def with_dropped(body: Mapping[str, Any], units: Sequence[Unit]) -> dict[str, Any]:
    """Return a chat request that declares dropped messages, besides its own declarations.

    The annotation of a dropped message applies to the drop: a message to forget is forgotten.
    """
    options = body.get("leyline")
    options = dict(options) if isinstance(options, dict) else {}
    own = options.get("edits")
    own = own if isinstance(own, list) else []
    gone = dict.fromkeys(index for unit in units for index in unit)
    forgotten = {edit["message"] for edit in own if edit.get("mode") == "forget"}
    forgotten |= {index for index in gone if is_forgotten(body["messages"][index])}
    drops = [
        {"message": index, "drop": True} | ({"mode": "forget"} if index in forgotten else {})
        for index in gone
    ]
    edits = [*(edit for edit in own if edit["message"] not in gone), *drops]
    return {**body, "leyline": {**options, "edits": edits}}
