"""Every text of a message, at any place, with some of it replaced."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_policies.builtin.detectors import Span
from leyline_policies.builtin.search import replaced
from leyline_policies.conversation import RESULT_ROLES
from leyline_policies.marks import edit
from leyline_policies.policy import Message

MAX_DEPTH = 128
"""Maximum depth of nested lists and objects in a message's members; deeper ones go as a whole."""

_DECODER = json.JSONDecoder(strict=False)
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
# Members that tie messages together are left alone, or calls would lose their results.
_MESSAGE_KEYS = frozenset({"role", "tool_call_id", "id"})
_CALL_KEYS = frozenset({"id", "type", "index"})
_PART_KEYS = frozenset({"type"})
_MARKERS = frozenset({"cache_control", "prompt_cache_breakpoint"})
_MARKER_KEYS = frozenset({"type", "ttl"})
_MEDIA = frozenset({"image_url", "video_url", "audio_url", "input_audio", "file", "audio"})
_MEDIA_KEYS = frozenset({"id", "file_id", "format", "detail", "expires_at"})
_MEDIA_DATA = frozenset({"data", "file_data"})
_OWN = "leyline"
_NAMES = frozenset(
    {
        *(*_MESSAGE_KEYS, *_CALL_KEYS, *_PART_KEYS, *_MARKERS, *_MARKER_KEYS),
        *(*_MEDIA, *_MEDIA_KEYS, *_MEDIA_DATA, _OWN),
        *("name", "content", "text", "tool_calls", "function_call", "function", "custom"),
        *("arguments", "input", "refusal", "reasoning", "reasoning_content", "reasoning_details"),
        *("thinking", "thinking_blocks", "signature", "annotations", "citations", "title", "url"),
        *("filename", "transcript", "is_error", "tags", "source"),
    }
)
"""Members that messages and their parts have by the API: their names are nobody's text."""
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]*+={0,2}\s*+")
_SURELY_DATA = 256
_LONGEST_HEAD = 200

Find = Callable[[str], Sequence[Span]]
"""Returns the spans of a text to replace, in order and apart."""


def whole(text: str) -> Sequence[Span]:
    """Return the span of the whole text."""
    return [(0, len(text))] if text else ()


@dataclass(frozen=True, slots=True)
class TextWalk:
    """A walk over all texts of a message, with ``replacement`` for the matches in them."""

    find: Find
    replacement: str
    joins: bool = True
    """True if the text parts of a content are one text, too."""

    def message(self, message: Message) -> Message:
        """Return the message with its texts edited; the given one if none changes."""
        # The name of a result is the tool's, by which it is found.
        is_result = message.get("role") in RESULT_ROLES
        kept = _MESSAGE_KEYS | {"name"} if is_result else _MESSAGE_KEYS
        members = self._members(message, self._of_message, kept)
        if members == message:
            return message
        edited = edit(message, without=message.keys() - members.keys())
        edited.update(members)
        return edited

    def _members(
        self,
        given: Mapping[str, Any],
        edited: Callable[[str, Any], Any],
        kept: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return an object with its names and values edited, except the values ``kept``."""
        members: dict[str, Any] = {}
        times: Counter[str] = Counter()
        for key, value in given.items():
            name = key if key in _NAMES else self._text(key)
            if name != key:
                name = _unlike(name, times, lambda each: each in given or each in members)
            stays = key in kept and not isinstance(value, dict | list)
            members[name] = value if stays else edited(key, value)
        return members

    def _of_message(self, key: str, value: Any) -> Any:
        if key == _OWN:
            return value
        if key == "tool_calls" and isinstance(value, list):
            return [self._call(call) for call in value]
        if key == "function_call":
            return self._called(value)
        if key == "content" and isinstance(value, list):
            parts = [self._part(part) for part in value]
            return self._across(parts) if self.joins else parts
        return self._of_part(key, value)

    def _part(self, part: Any) -> Any:
        if not isinstance(part, dict):
            return self._any(part)
        return self._members(part, self._of_part, _PART_KEYS)

    def _of_part(self, key: str, value: Any) -> Any:
        if key in _MEDIA:
            return self._media(key, value)
        if key in _MARKERS and isinstance(value, dict):
            return self._members(value, self._of_any, _MARKER_KEYS)
        return self._any(value)

    def _across(self, parts: list[Any]) -> list[Any]:
        """Return the parts of a content without matches that reach from one text into the next."""
        texts = [(i, part["text"]) for i, part in enumerate(parts) if _has_text(part)]
        if len(texts) < 2:
            return parts
        spans = self.find("".join(text for _, text in texts))
        begin = 0
        for at, text in texts if spans else ():
            left: list[str] = []
            done = 0
            for start, end in ((start - begin, end - begin) for start, end in spans):
                if start < len(text) and end > 0:
                    # The replacement is put where the match begins.
                    left += (text[done : max(start, 0)], self.replacement if start >= 0 else "")
                    done = min(end, len(text))
            if left:
                parts[at] = {**parts[at], "text": "".join((*left, text[done:]))}
            begin += len(text)
        return parts

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return self._any(call)
        return self._members(call, self._of_call, _CALL_KEYS)

    def _of_call(self, key: str, value: Any) -> Any:
        return self._called(value) if key in ("function", "custom") else self._any(value)

    def _called(self, body: Any) -> Any:
        """Return the function that a call names, with its arguments."""
        if not isinstance(body, dict):
            return self._any(body)
        return self._members(body, self._of_function, ("name",))

    def _of_function(self, key: str, value: Any) -> Any:
        is_json = key == "arguments" and isinstance(value, str)
        return self._arguments(value) if is_json else self._any(value)

    def _arguments(self, text: str) -> str:
        """Edit JSON text so that it stays JSON.

        Matches are looked for in its decoded strings first (where an escaped quote or line break
        can't hide one), then in the text as written (a match may span a key and its value). When
        the second would break the JSON, everything goes.
        """
        if not _is_json(text):
            return self._text(text)
        inside = _JSON_STRING.sub(self._json_string, text)
        across = self._text(inside)
        return (
            across
            if across == inside or _is_json(across)
            else json.dumps({self.replacement: self.replacement})
        )

    def _json_string(self, found: re.Match[str]) -> str:
        literal = found.group()
        value = _DECODER.decode(literal) if "\\" in literal else literal[1:-1]
        edited = self._text(value)
        if edited == value:
            return literal
        return json.dumps(edited, ensure_ascii=literal.isascii() or "\\u" in literal)

    def _media(self, key: str, value: Any) -> Any:
        """Edit a picture's address, which is text, but not its data."""
        if isinstance(value, str):
            return value if _is_data(key, value) else self._text(value)
        if isinstance(value, dict):
            return self._members(value, self._media, _MEDIA_KEYS)
        return self._any(value)

    def _of_any(self, key: str, value: Any) -> Any:
        return self._any(value)

    def _any(self, value: Any, depth: int = 0) -> Any:
        """Edit every string and number at any depth of a JSON value, and every name."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict | list) and depth >= MAX_DEPTH:
            return self.replacement
        if isinstance(value, dict):
            return self._members(value, lambda _, each: self._any(each, depth + 1))
        if isinstance(value, list):
            return [self._any(each, depth + 1) for each in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self._number(value)
        return value

    def _number(self, number: float) -> Any:
        try:
            text = str(number)
        except ValueError:  # it has thousands of digits
            return self.replacement
        edited = self._text(text)
        return number if edited == text else edited

    def _text(self, text: str) -> str:
        return replaced(text, self.find(text), self.replacement) if text else text


def _unlike(name: str, times: Counter[str], is_taken: Callable[[str], bool]) -> str:
    """Return ``name``, or one like it that isn't taken.

    Args:
        times: number of requests for each name.
    """
    while True:
        times[name] += 1
        numbered = name if times[name] == 1 else f"{name}_{times[name]}"
        if not is_taken(numbered):
            return numbered


def is_media(part: Any) -> bool:
    """Return True if a part of a content is a picture, a sound or a file."""
    return isinstance(part, dict) and not _MEDIA.isdisjoint(part)


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _is_data(key: str, value: str) -> bool:
    """Return True if a text is the data of a picture, a sound or a file."""
    head, comma, data = value.partition(",")
    if comma and head.startswith("data:") and head.endswith(";base64"):
        return len(head) <= _LONGEST_HEAD and _BASE64.fullmatch(data) is not None
    is_long = key in _MEDIA_DATA and len(value) >= _SURELY_DATA
    return is_long and _BASE64.fullmatch(value) is not None


def _is_json(text: str) -> bool:
    try:
        _DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return True
