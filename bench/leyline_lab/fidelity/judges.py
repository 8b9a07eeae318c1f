"""Judges of answers: the value that they have, and the tool that they call. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_AROUND = ".,;:'\"*()[]"


def says(text: str, value: str) -> bool:
    """Return True if a text has a value as a word."""
    words = text.replace("=", " ").replace("`", " ").split()
    return value in [word.strip(_AROUND) for word in words]


_NAME = r"[A-Za-z_][\w.\-]{0,127}"
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FORMATS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"<function=({_NAME})>",
        rf"<｜tool▁sep｜>({_NAME})",  # DeepSeek
        rf"<tool_call>\s*({_NAME})\s*(?:\n|<arg_key>)",  # GLM
        rf"<\|tool_call_begin\|>\s*(?:functions\.)?({_NAME})",  # Kimi, Moonlight
        rf'"(?:name|function)"\s*:\s*"({_NAME})"\s*,\s*"(?:arguments|parameters)"\s*:',
    )
)


def tagged_calls(text: str) -> Iterator[dict[str, Any]]:
    """Yield the calls of an answer that are JSON objects with a name between tags, in order."""
    for block in _TAGGED.findall(text):
        try:
            parsed = json.loads(block)
        except (ValueError, RecursionError):
            continue
        if isinstance(parsed, dict) and isinstance(parsed.get("name"), str):
            yield parsed


def called_tool(text: str) -> str | None:
    """Return the name of the first tool that an answer calls; None if it calls none.

    A JSON call counts once its arguments begin, as a short answer may end within them.
    """
    for call in tagged_calls(text):
        return str(call["name"])
    found = [match for pattern in _FORMATS if (match := pattern.search(text))]
    first = min(found, key=lambda match: match.start(), default=None)
    return first[1] if first else None
