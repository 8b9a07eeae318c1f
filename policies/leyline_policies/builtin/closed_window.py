"""The policy that closes file views which a newer view of the same file replaces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from leyline_policies.builtin.tool_results import first_answer, with_edits
from leyline_policies.context import Context
from leyline_policies.conversation import RESULT_ROLES, nth_last
from leyline_policies.marks import edit
from leyline_policies.policy import Message, Mode

_ROLES = RESULT_ROLES | {"user"}
_LINE = re.compile(r"^\d+:.*(?:\n|$)", re.MULTILINE)
# Searched in one line, from its "[File:" on: a pattern of both is quadratic in hostile output.
_TOTAL = re.compile(r"\s\(\d{1,12}\s{1,4}lines total\)\]")
_FILE = "[File:"
_NO_VIEWS: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ClosedWindow:
    """Omit the lines of a file view when a later view shows the same file.

    A view is a text with a line ``[File: PATH (N lines total)]`` and numbered lines, ``12:…``, as
    the window of SWE-agent's editor prints them. In an older one the numbered lines become a line
    that counts them. The policy searches tool results and, as some harnesses send results so, user
    messages after the first assistant message; the last user message stays.

    The rule and its text are SWE-agent's ``ClosedWindowHistoryProcessor`` (SWE-agent at 318f909,
    sweagent/agent/history_processors.py). Different from it: tool results count too, each text part
    of a part list counts for itself, and a text that has numbered lines but names no file stays,
    where SWE-agent drops the message.
    """

    name: ClassVar[str] = "closed_window"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with superseded views closed."""
        if not context.any(messages, _views, "views"):
            return messages
        shown = context.each(messages, _views, "views")
        first, last_user = first_answer(messages), nth_last(messages, "user", 1)
        seen: set[str] = set()
        edits: dict[int, Message] = {}
        for index in range(len(messages) - 1, first - 1, -1):
            message, views = messages[index], shown[index]
            if not views:
                continue
            stale: set[int] = set()
            for place, file in reversed(tuple(views.items())):
                if file in seen:
                    stale.add(place)
                seen.add(file)
            if stale and index != last_user:
                edits[index] = _closed(message, frozenset(stale), context)
        return with_edits(messages, edits)


def _views(message: Message) -> Mapping[int, str]:
    """Return the files that the message shows, by the place of the text among its parts."""
    if message.get("role") not in _ROLES:
        return _NO_VIEWS
    content = message.get("content")
    parts = [content] if isinstance(content, str) else content if isinstance(content, list) else ()
    found: dict[int, str] = {}
    for place, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else part
        file = _file_shown(text) if isinstance(text, str) else None
        if file is not None:
            found[place] = file
    return found or _NO_VIEWS


def _file_shown(text: str) -> str | None:
    """Return the file whose lines the text shows."""
    at = text.find(_FILE)
    if at < 0 or _LINE.search(text) is None:
        return None
    while at >= 0:
        end = text.find("\n", at)
        line = text[at + len(_FILE) : end if end >= 0 else len(text)]
        totals = list(_TOTAL.finditer(line)) if line[:1].isspace() else []
        if totals:
            return line[: totals[-1].start()].strip()
        at = text.find(_FILE, end) if end >= 0 else -1
    return None


def _closed(message: Message, stale: frozenset[int], context: Context) -> Message:
    def compute(message: Message) -> Message:
        content = message["content"]
        if isinstance(content, str):
            return edit(message, content=_close(content), cause="superseded")
        parts = [
            _closed_part(part) if place in stale else part for place, part in enumerate(content)
        ]
        return edit(message, content=parts, cause="superseded")

    return context.once(message, compute, stale)


def _closed_part(part: Any) -> Any:
    return {**part, "text": _close(part["text"])} if isinstance(part, dict) else _close(part)


def _close(text: str) -> str:
    lines = list(_LINE.finditer(text))
    note = f"Outdated window with {len(lines)} lines omitted...\n"
    return text[: lines[0].start()] + note + text[lines[-1].end() :]
