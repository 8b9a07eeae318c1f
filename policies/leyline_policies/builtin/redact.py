"""The policy that takes secrets out of the history."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

from leyline_policies.builtin.patterns import (
    Matcher,
    PatternTimeoutError,
    UserPattern,
    compile_pattern,
)
from leyline_policies.errors import did_you_mean, shown
from leyline_policies.policy import Message, Mode

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
# What ties messages together is left alone, or calls would lose their results.
_MESSAGE_KEYS = frozenset({"role", "name", "tool_call_id", "id", "cache_control"})
_CALL_KEYS = frozenset({"id", "type", "index"})
_PART_KEYS = frozenset({"type", "cache_control"})
_MEDIA = frozenset({"image_url", "video_url", "audio_url", "input_audio", "file", "audio"})
_MEDIA_KEYS = frozenset({"data", "file_data", "id", "file_id", "format", "detail"})


@dataclass(frozen=True, slots=True)
class Redact:
    """Replace what ``pattern`` matches, and make the model forget it.

    Every text of a message is searched: string contents, text parts, reasoning, refusals, the
    arguments of tool calls (inside their JSON strings, which stay valid JSON) and texts under keys
    that Leyline does not know. Roles, names, ids and media data stay. ``replacement`` is taken
    literally. With ``roles`` only messages of these roles are searched.
    """

    name: ClassVar[str] = "redact"
    mode: ClassVar[Mode] = "forget"

    pattern: str = field(repr=False)
    replacement: str = "[redacted]"
    roles: tuple[str, ...] | None = None
    _compiled: UserPattern = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError for an unusable pattern, replacement or role."""
        compiled = compile_pattern(self.pattern)
        object.__setattr__(self, "_compiled", compiled)
        try:
            empty = compiled.matches_nothing()
        except PatternTimeoutError as error:
            raise ValueError(f"pattern={shown(self.pattern)} takes too long on no text") from error
        if empty:
            raise ValueError(f"pattern={shown(self.pattern)} matches empty text everywhere")
        for role in self.roles or ():
            if role not in _ROLES:
                raise ValueError(
                    f"roles: {shown(role)} is no role{did_you_mean(role, _ROLES) or ';'} "
                    f"(known: {', '.join(_ROLES)})"
                )
        if self.roles is not None and not self.roles:
            raise ValueError("roles=[] names no role; leave it out to search all")

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]:
        """Return the messages with every match replaced. Raises PatternTimeoutError."""
        redaction = _Redaction(self._compiled.matcher(), self.replacement)
        return [
            redaction.message(message)
            if self.roles is None or message.get("role") in self.roles
            else message
            for message in messages
        ]


@dataclass(frozen=True, slots=True)
class _Redaction:
    """One transform call."""

    matcher: Matcher
    replacement: str

    def message(self, message: Message) -> Message:
        edited = {key: self._member(key, value) for key, value in message.items()}
        return message if edited == message else edited

    def _member(self, key: str, value: Any) -> Any:
        if key in _MESSAGE_KEYS:
            return value
        if key == "content" and isinstance(value, list):
            return [self._part(part) for part in value]
        if key == "tool_calls" and isinstance(value, list):
            return [self._call(call) for call in value]
        if key == "function_call":
            return self._called(value)
        if key in _MEDIA:
            return self._media(value)
        return self._any(value)

    def _part(self, part: Any) -> Any:
        if not isinstance(part, dict):
            return self._any(part)
        return {
            key: self._media(value) if key in _MEDIA else self._unless(_PART_KEYS, key, value)
            for key, value in part.items()
        }

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return self._any(call)
        return {
            key: self._called(value)
            if key in ("function", "custom")
            else self._unless(_CALL_KEYS, key, value)
            for key, value in call.items()
        }

    def _called(self, body: Any) -> Any:
        """The function that a call names, with its arguments."""
        if not isinstance(body, dict):
            return self._any(body)
        return {
            key: self._arguments(value)
            if key == "arguments" and isinstance(value, str)
            else self._unless(frozenset({"name"}), key, value)
            for key, value in body.items()
        }

    def _arguments(self, text: str) -> str:
        """Redact JSON text so that it stays JSON.

        Matches are looked for in its decoded strings first (where an escaped quote or line break
        can't hide one), then in the text as written (a match may span a key and its value). When
        the second would break the JSON, everything goes.
        """
        if not _is_json(text):
            return self._text(text)
        inside = _JSON_STRING.sub(self._json_string, text)
        across = self._text(inside)
        return across if _is_json(across) else json.dumps({self.replacement: self.replacement})

    def _json_string(self, found: re.Match[str]) -> str:
        literal = found.group()
        value = json.loads(literal, strict=False)
        redacted = self._text(value)
        if redacted == value:
            return literal
        return json.dumps(redacted, ensure_ascii=literal.isascii() or "\\u" in literal)

    def _media(self, value: Any) -> Any:
        """A picture's address is text; its data is not."""
        if isinstance(value, str):
            return value if value.startswith("data:") else self._text(value)
        if isinstance(value, dict):
            return {
                key: each if key in _MEDIA_KEYS else self._media(each)
                for key, each in value.items()
            }
        return value

    def _unless(self, structural: Collection[str], key: str, value: Any) -> Any:
        return value if key in structural else self._any(value)

    def _any(self, value: Any) -> Any:
        """Redact every string at any depth of a JSON value."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {key: self._any(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._any(each) for each in value]
        return value

    def _text(self, text: str) -> str:
        return self.matcher.replaced(text, lambda found: self._replace(text, found))

    def _replace(self, text: str, found: re.Match[str]) -> str:
        """The replacement; a match that lies within an earlier one is left, or it would grow."""
        size = len(self.replacement)
        start, end = max(0, found.end() - size), found.start() + size
        inside = size > 0 and text.find(self.replacement, start, end) >= 0
        return found.group() if inside else self.replacement


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True
