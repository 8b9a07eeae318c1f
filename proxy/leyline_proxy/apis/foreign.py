"""Items in a history that only another provider can carry out, or read.

An agent may change its model in the middle of a session. Its history then holds what the servers
of the model before did: searches, code, pages. The proxy shows the model what of it is text, and
leaves the rest out. So a history never becomes unusable, and what the model reads is an ordinary
text of its message, which policies, edits and forgets reach.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec


class Treatment(StrEnum):
    """The fate of an item."""

    MAPPED = "mapped"
    """It has a form of its own in a chat request."""
    TEXT = "text"
    """Its texts are shown, under its type; an item without any is left out."""
    SKIPPED = "skipped"
    """It is left out."""


READABLE = (
    "name",
    "server_name",
    "server_label",
    "tool_name",
    "title",
    "context",
    "filename",
    "url",
    "image_url",
    "query",
    "queries",
    "revised_prompt",
    "input",
    "arguments",
    "action",
    "code",
    "text",
    "source",
    "content",
    "summary",
    "tool_references",
    "stdout",
    "stderr",
    "logs",
    "lines",
    "output",
    "outputs",
    "result",
    "results",
    "outcome",
    "return_code",
    "exit_code",
    "approve",
    "error",
    "error_code",
    "error_message",
    "message",
    "reason",
)
"""Members that hold texts for a model, in the order in which they are shown, whatever the client's
is. All others are ids, states, or data for the provider's own servers."""

_DATA = frozenset({"input", "arguments", "action"})
"""Members that are shown as JSON if they are objects."""
_CODES = frozenset({"return_code", "exit_code", "approve"})
"""Members that are shown with their names, unless they are 0."""

_DEEPEST = 12
"""Levels of an item that are read."""
_LONGEST_TYPE = 80
_ENCODED = re.compile(r"[A-Za-z0-9+/=_-]{256,}")
"""Text that nobody reads: base64 and the like."""
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?[;,]")


@dataclass(frozen=True, slots=True)
class Rule:
    """The treatment of items of one type."""

    treatment: Treatment
    why: str
    """Its form in the chat request, or the reason that it has none; for the documentation."""
    members: tuple[str, ...] = READABLE
    """Members that are shown."""
    native: bool = False
    """True if an upstream that speaks the client's API gets it as it is."""


def mapped(form: str) -> Rule:
    """Return the rule for items that have a form of their own."""
    return Rule(Treatment.MAPPED, form, native=True)


UNKNOWN = Rule(Treatment.TEXT, "its texts under its type; left out if it has none")
"""The rule for types that no table has."""


def shown_text(item: Mapping[str, Any], rule: Rule = UNKNOWN) -> str:
    """Return the text that a model gets for an item; empty if it is left out.

    Media, and data that are no text, show as their type in brackets, or not at all.
    """
    if rule.treatment is not Treatment.TEXT:
        return ""
    lines = [line for line in _members(item, rule.members, 0) if line]
    kind = str(item.get("type"))[:_LONGEST_TYPE]
    return f"[{kind}] " + "\n".join(lines) if lines else ""


def readable(value: object) -> Iterator[str]:
    """Yield the texts in a value for a model, in the order of :data:`READABLE`."""
    return filter(None, _texts(value, 0))


def joined_texts(pieces: Iterable[tuple[str, bool]]) -> str:
    """Return the text of a message.

    Args:
        pieces: texts, each with True if it is shown for an item. Such texts have lines of their
            own; the model's own are joined as the engine gave them, without a separator.
    """
    parts: list[str] = []
    after_shown = False
    for text, shown in pieces:
        if not text:
            continue
        if parts and (shown or after_shown) and not parts[-1].endswith("\n"):
            parts.append("\n")
        parts.append(text)
        after_shown = shown
    return "".join(parts)


def _members(value: Mapping[str, Any], names: tuple[str, ...], depth: int) -> Iterator[str]:
    whole = value.get("file_type", "text") == "text"
    for name in names:
        found = value.get(name)
        if found is None:
            continue
        if name == "source":
            yield from _source(found, depth)
        elif name == "content" and not whole:
            yield f"[{value['file_type']}]"
        elif name in _DATA and isinstance(found, dict):
            yield msgspec.json.encode(found).decode()
        elif name in _CODES:
            if isinstance(found, bool | int) and (found is False or found):
                yield f"{name}: {msgspec.json.encode(found).decode()}"
        else:
            yield from _texts(found, depth + 1)


def _texts(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        if url := _DATA_URL.match(value):
            yield f"[{url[1] or 'data'}]"
        elif not _ENCODED.fullmatch(value):
            yield value
    elif depth > _DEEPEST:
        return
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, depth + 1)
    elif isinstance(value, dict):
        yield from _members(value, READABLE, depth)


def _source(source: object, depth: int) -> Iterator[str]:
    """Yield the texts of a document's or a picture's source."""
    match source:
        case {"type": "text", "data": str(text)}:
            yield text
        case {"type": "base64" | "file", **rest}:
            kind = rest.get("media_type")
            yield f"[{kind if isinstance(kind, str) else 'file'}]"
        case _:
            yield from _texts(source, depth + 1)
