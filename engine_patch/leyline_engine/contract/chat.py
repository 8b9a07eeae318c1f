"""Messages for chat templates, in the one form that every template can render.

Clients write the same conversation in several ways: no content beside tool calls, arguments as
JSON text, texts as lists of parts. Templates expect one of them, so serving engines normalise
before they render. Engine and proxy must do it alike, or their tokens differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

ChatMessage = Mapping[str, Any]


class ChatDialect(StrEnum):
    """An engine's normalisation of chat requests, as its renderer document names it."""

    LEYLINE = "leyline"
    """Messages as :func:`normalize_messages` returns them; tools and options as they came."""
    SGLANG = "sglang"
    """Messages as SGLang's chat completions prepare them."""
    VLLM = "vllm"
    """Messages as vLLM's chat completions prepare them."""


TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that are text, with the member that has it."""

_TEXT_ONLY_ROLES = frozenset({"tool", "function"})
"""Roles whose contents are text by the API's definition; templates that loop over a user's parts
still print a result's parts as data (GLM-4.6: Python's repr)."""

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_STATEMENT = re.compile(r"\{%[-+]?\s*(for|set)\s(.*?)[-+]?%\}", re.DOTALL)
_LOOP = re.compile(r".+?\sin\s+(?P<value>.+)", re.DOTALL)
_ASSIGNMENT = re.compile(r"\s*(?P<name>\w+)\s*=\s*(?P<value>.+)", re.DOTALL)
_EXPRESSION_END = re.compile(r"\||\s(?:if|else|or|recursive)\b")
_SLICE = re.compile(r"\[[^\[\]]*:[^\[\]]*\]$")
_MEMBER = re.compile(
    r"""\w[\w.\[\]'"-]*?(?:\.content|\[\s*['"]content['"]\s*\]|\.get\(\s*['"]content['"].*\))""",
    re.DOTALL,
)


def normalize_messages(messages: Sequence[ChatMessage], *, parts: bool) -> list[ChatMessage]:
    """Return the conversation as chat templates expect it; as many messages, in the same order.

      * A null or missing content becomes the empty string.
      * Arguments of an assistant's tool calls that are JSON text of an object become that object;
        any other text stays as it is.
    * ``tool_calls`` that are null or empty are left out: templates test for their presence.
    * A list of content parts becomes its texts, joined. If the template loops over parts itself,
      lists stay, except those of tool results that consist of text.

      Args:
          messages: OpenAI chat messages as decoded JSON; never changed.
          parts: the result of :func:`template_takes_parts` for the template.

      Returns:
          The same objects where nothing had to change, and changed copies elsewhere. A second
          normalisation changes nothing.
    """
    return [_normalized(message, parts) for message in messages]


def template_takes_parts(chat_template: str) -> bool:
    """Return True if the template loops over a message's content, and so takes lists of parts.

    It searches the Jinja source, which need not compile: a ``for`` over ``….content``,
    ``…['content']``, ``….get('content')``, over a variable set to one of those, or over a variable
    called ``content``, as macros name their parameter. Filters and slices may follow.
    """
    names = {"content"}
    for keyword, statement in _STATEMENT.findall(_COMMENT.sub("", chat_template)):
        if keyword == "set":
            found = _ASSIGNMENT.fullmatch(statement)
            if found and _is_content(found["value"], names):
                names.add(found["name"])
        elif (found := _LOOP.fullmatch(statement)) and _is_content(found["value"], names):
            return True
    return False


def _is_content(expression: str, names: set[str]) -> bool:
    bare = _EXPRESSION_END.split(expression, maxsplit=1)[0].strip().lstrip("(")
    value = _SLICE.sub("", bare)
    return value in names or _MEMBER.fullmatch(value) is not None


def _normalized(message: ChatMessage, parts: bool) -> ChatMessage:
    changes = dict(_changes(message, parts))
    if "tool_calls" in message and message["tool_calls"] in (None, []):
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**kept, **changes}
    return {**message, **changes} if changes else message


def _changes(message: ChatMessage, parts: bool) -> Iterator[tuple[str, Any]]:
    content = message.get("content")
    if content is None:
        yield "content", ""
    elif isinstance(content, list) and not (parts and _keeps_parts(message, content)):
        yield "content", "".join(filter(None, map(_text_of, content)))
    calls = message.get("tool_calls")
    if message.get("role") == "assistant" and isinstance(calls, list):
        opened = [_with_object(call) for call in calls]
        if any(new is not old for new, old in zip(opened, calls, strict=True)):
            yield "tool_calls", opened


def _keeps_parts(message: ChatMessage, content: list[Any]) -> bool:
    """Return True if a list stays a list for a template that loops over parts."""
    only_text = all(_text_of(part) is not None for part in content)
    return not (message.get("role") in _TEXT_ONLY_ROLES and only_text)


def _text_of(part: object) -> str | None:
    """Return a part's text, or None if it has none."""
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else None


def _with_object(call: Any) -> Any:
    """Return the call with its arguments as an object; the same call if they aren't one's text."""
    match call:
        case {"function": {"arguments": str(text)} as function}:
            value = _json_object(text)
            return call if value is None else {**call, "function": {**function, "arguments": value}}
    return call


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            return None
        if "\\ud" in text.lower():  # half a surrogate pair is JSON, but no text to tokenise
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value
