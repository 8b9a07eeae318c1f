"""The erratum: a note at the end of shortened messages, as a model's fidelity profile recommends.

KV after a cut has read the text. The note says that something is gone, and that what was said of it
later may be stale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from leyline_policies import Memo

from ..model.messages import Message
from ..model.prepared import POLICY, SentMessage
from .stage import Stage

_KEY = "erratum"


def add_errata(done: Stage, client: Sequence[Message], text: str, memo: Memo) -> Stage:
    """Return the list with the note at the end of each message that a policy shortened.

    Only amortized edits get one: nothing has read what is forgotten.

    Args:
        client: the caller's list.
        text: the note, with ``{name}`` in place of the tool's name.
    """
    if not text:
        return done
    tools = _tool_names(done.messages)
    names = [
        _name(entry, client, tools) if entry.client_index not in done.demands else None
        for entry in done.sent
    ]
    sent = memo.map(done.sent, (_KEY, text), partial(_with_erratum, text), told=names)
    return replace(done, sent=tuple(sent))


def _tool_names(messages: Sequence[Message]) -> dict[str, str]:
    """Return the names of called tools by the call's id."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    found = ((call.get("id"), call.get("function")) for call in calls if isinstance(call, dict))
    return {
        str(id_): str(function.get("name"))
        for id_, function in found
        if isinstance(function, Mapping)
    }


def _name(entry: SentMessage, client: Sequence[Message], tools: Mapping[str, str]) -> str | None:
    """Return the name for a message's note; None if it gets none."""
    if entry.client_index is None or not entry.changes:
        return None
    content, before = entry.message.get("content"), client[entry.client_index].get("content")
    if not isinstance(content, str) or not isinstance(before, str) or len(content) >= len(before):
        return None
    if not all(change.cause.startswith(f"{POLICY}:") for change in entry.changes):
        return None
    return tools.get(str(entry.message.get("tool_call_id"))) or str(entry.message.get("role"))


def _with_erratum(text: str, entry: SentMessage, name: str | None) -> SentMessage:
    if name is None:
        return entry
    note = text.replace("{name}", name)
    content = " ".join(filter(None, (entry.message["content"], note)))
    return msgspec.structs.replace(entry, message={**entry.message, "content": content})
