"""The policy that takes secrets out of the history."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from leyline_policies.builtin.detectors import Rule, load_detectors
from leyline_policies.builtin.patterns import PatternTimeoutError, compile_pattern
from leyline_policies.builtin.search import Search
from leyline_policies.context import Context
from leyline_policies.errors import did_you_mean, shown
from leyline_policies.marks import edit
from leyline_policies.policy import Message, Mode

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_DECODER = json.JSONDecoder(strict=False)
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
# What ties messages together is left alone, or calls would lose their results.
_MESSAGE_KEYS = frozenset({"role", "name", "tool_call_id", "id", "cache_control", "leyline"})
_CALL_KEYS = frozenset({"id", "type", "index"})
_PART_KEYS = frozenset({"type", "cache_control"})
_MEDIA = frozenset({"image_url", "video_url", "audio_url", "input_audio", "file", "audio"})
_MEDIA_KEYS = frozenset({"data", "file_data", "id", "file_id", "format", "detail"})


@dataclass(frozen=True, slots=True)
class Redact:
    """Replace what patterns match and detectors find, and make the model forget it.

    ``pattern`` and ``patterns`` are regular expressions; ``detectors`` names kinds of keys and
    personal data (`leyline_policies.builtin.detectors`; ``keys`` and ``pii`` are all of a kind).
    ``phone_region`` (US, DE, …) makes the detector ``phone`` find numbers without a country code.

    Every text of a message is searched: string contents, text parts, reasoning, refusals, the
    arguments of tool calls (inside their JSON strings, which stay valid JSON) and texts under keys
    that Leyline does not know. Roles, names, ids and media data stay. ``replacement`` is taken
    literally. With ``roles`` only messages of these roles are searched.

    When matching takes too long the policy fails for the turn, and the text goes on as it was;
    with ``on_timeout="withhold"`` what couldn't be searched is withheld instead: all texts of the
    message become the replacement.
    """

    name: ClassVar[str] = "redact"
    mode: ClassVar[Mode] = "forget"
    trusted: ClassVar[bool] = True

    pattern: str | None = field(default=None, repr=False)
    replacement: str = "[redacted]"
    roles: tuple[str, ...] | None = None
    patterns: tuple[str, ...] = field(default=(), repr=False)
    detectors: tuple[str, ...] = ()
    phone_region: str | None = None
    on_timeout: Literal["skip", "withhold"] = "skip"
    _rules: tuple[Rule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError for an unusable pattern, detector, replacement or role."""
        own = self.patterns if self.pattern is None else (self.pattern, *self.patterns)
        if not own and not self.detectors:
            raise ValueError("nothing to look for; give pattern, patterns or detectors")
        rules = (*map(_own_rule, own), *load_detectors(self.detectors, self.phone_region))
        object.__setattr__(self, "_rules", rules)
        if self.on_timeout not in ("skip", "withhold"):
            raise ValueError(f"on_timeout={self.on_timeout} must be skip or withhold")
        for role in self.roles or ():
            if role not in _ROLES:
                raise ValueError(
                    f"roles: {shown(role)} is no role{did_you_mean(role, _ROLES) or ';'} "
                    f"(known: {', '.join(_ROLES)})"
                )
        if self.roles is not None and not self.roles:
            raise ValueError("roles=[] names no role; leave it out to search all")

    def transform(
        self, messages: list[Message], turn_idx: int, context: Context | None = None
    ) -> list[Message]:
        """Return the messages with every match replaced. Raises PatternTimeoutError."""
        context = context or Context()
        search = Search(self._rules, patient=self.on_timeout == "skip")
        walk = _Walk(lambda text: search.redacted(text, self.replacement), self.replacement)

        def redacted(message: Message) -> Message:
            if self.roles is not None and message.get("role") not in self.roles:
                return message
            if self.on_timeout == "skip":
                return walk.message(message)
            search.begin()
            try:
                return walk.message(message)
            except PatternTimeoutError:
                if search.exhausts():
                    return withheld(message, self.replacement)
                raise

        try:
            edited = context.each(messages, redacted)
        except PatternTimeoutError:
            if self.on_timeout == "skip":
                raise
            # The time of this turn is used up; what was found so far stays, and there is more on
            # the next.
            edited = [self._or_withheld(message, redacted, context) for message in messages]
        return messages if edited == messages else edited

    def found_in(self, message: Message) -> frozenset[str]:
        """What would be replaced in ``message``; of a message that takes too long, its whole."""
        search, found = Search(self._rules), set[str]()

        def collect(text: str) -> str:
            found.update(text[start:end] for start, end in search.spans(text, self.replacement))
            return text

        try:
            _Walk(collect, self.replacement).message(message)
        except PatternTimeoutError:
            return frozenset({repr(message)})
        return frozenset(found)

    def _or_withheld(
        self, message: Message, redacted: Callable[[Message], Message], context: Context
    ) -> Message:
        try:
            return context.once(message, redacted)
        except PatternTimeoutError:
            return withheld(message, self.replacement)


def withheld(message: Message, replacement: str) -> Message:
    """The message with ``replacement`` in place of every text."""
    walk = _Walk(lambda text: replacement if text else text, replacement)
    edited = walk.message(message)
    content = edited.get("content")
    if edited is not message and isinstance(content, list):
        # An address that is none any more is no picture either.
        edited["content"] = [
            {"type": "text", "text": replacement}
            if isinstance(new, dict) and new != old and not _MEDIA.isdisjoint(new)
            else new
            for old, new in zip(message["content"], content, strict=True)
        ]
    return edited


def _own_rule(pattern: str) -> Rule:
    compiled = compile_pattern(pattern)
    try:
        empty = compiled.matches_nothing()
    except PatternTimeoutError as error:
        raise ValueError(f"pattern={shown(pattern)} takes too long on no text") from error
    if empty:
        raise ValueError(f"pattern={shown(pattern)} matches empty text everywhere")
    return Rule(compiled)


@dataclass(frozen=True, slots=True)
class _Walk:
    """All texts of a message, edited."""

    edit: Callable[[str], str]
    replacement: str

    def message(self, message: Message) -> Message:
        """The message with its texts edited; the given one if none changes."""
        members = {key: self._member(key, value) for key, value in message.items()}
        if members == message:
            return message
        edited = edit(message)
        edited.update(members)
        return edited

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
        return (
            across
            if across == inside or _is_json(across)
            else json.dumps({self.replacement: self.replacement})
        )

    def _json_string(self, found: re.Match[str]) -> str:
        literal = found.group()
        value = _DECODER.decode(literal) if "\\" in literal else literal[1:-1]
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
        return self.edit(text) if text else text


def _is_json(text: str) -> bool:
    try:
        _DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return True
