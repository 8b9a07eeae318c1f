"""Recorded text for ``leyline bench reuse``: of a folder of traces, or of the demo's session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from ..errors import TraceError
from .recordings import Message, RecordedSession, Tool, read_trace

ENOUGH = 400_000
"""Maximum number of characters that are read."""
MAX_TOOLS = 8
_LONGEST = 4_000
"""Maximum number of characters of one message, so that no single file makes up all the text."""


@dataclass(frozen=True, slots=True)
class Material:
    """Recorded text that workloads cut their parts from."""

    text: str
    tools: tuple[Mapping[str, Any], ...]
    """Schemas of tools."""


def demo_material() -> Material:
    """Return the text of the recorded session that ships with the package."""
    with as_file(files("leyline_lab") / "demo" / "session.jsonl.gz") as path:
        return _material(read_trace(path).sessions)


def recorded_material(folder: Path) -> Material:
    """Return text of the recordings ``sessions_*`` in a folder, of each in turn.

    Raises:
        TraceError: the folder has none, or one can't be read.
    """
    paths = sorted(folder.glob("sessions_*.jsonl*"))
    if not paths:
        raise TraceError(f"{folder} has no recordings called sessions_….jsonl or .jsonl.gz")
    recorded = (read_trace(path).sessions for path in paths)
    in_turn = chain.from_iterable(zip_longest(*recorded))
    return _material(session for session in in_turn if session is not None)


def _material(sessions: Iterable[RecordedSession]) -> Material:
    texts: list[str] = []
    tools: dict[str, Tool] = {}
    length = 0
    for session in sessions:
        last = session.requests[-1]
        for tool in last.tools:
            tools.setdefault(_name(tool), tool)
        for text in _texts(last.messages):
            texts.append(text)
            length += len(text)
        if length > ENOUGH:
            break
    tools = {name: tool for name, tool in tools.items() if name}
    chosen = [*tools.values(), *_more_tools(tools)][:MAX_TOOLS]
    return Material("\n".join(texts)[:ENOUGH], tuple(chosen))


def _texts(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and content.strip():
            yield content[:_LONGEST]


def _name(tool: Tool) -> str:
    return str(tool.get("function", tool).get("name", ""))


def _more_tools(known: Iterable[str]) -> Iterator[Tool]:
    """Yield schemas of Leyline's own, for recordings that have few."""
    taken = set(known)
    for name, description, parameters in _SCHEMAS:
        if name not in taken:
            properties: dict[str, Any] = {
                field: {"type": "string", "description": text} for field, text in parameters.items()
            }
            yield {
                "type": "function",
                "function": {
                    "name": name,
                    "description": description,
                    "parameters": {"type": "object", "properties": properties},
                },
            }


_SCHEMAS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "list_policies",
        "List the policies that run on each turn, with their triggers and their settings.",
        {"session": "Id of the session.", "role": "Role of the messages that a policy may edit."},
    ),
    (
        "read_receipt",
        "Return the engine's report on one request: its outcome, the reason and the counts.",
        {"message_id": "Id of the request.", "replica": "Replica that served it."},
    ),
    (
        "pin_messages",
        "Keep the cached content of some messages for a time, whatever else the engine serves.",
        {"first": "First message.", "last": "Last message.", "seconds": "How long to keep them."},
    ),
    (
        "forget_span",
        "Erase a span of the history, and all that was computed after it was read.",
        {"span": "Name of the span.", "why": "Reason, for the audit."},
    ),
    (
        "search_history",
        "Search the messages of a session for words, and return the matching ones in order.",
        {"words": "Words, separated by blanks.", "limit": "Maximum number of messages."},
    ),
)
