"""Server-sent events as bytes: split without decoding, changed only by appending a member.

Events keep their exact bytes, terminator included, so that joining them gives the stream back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import orjson

from ..errors import AnswerTooLargeError
from ..request.wire import put_members, take_member

_BOUNDARY = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LONGEST_BOUNDARY = 4
DONE = b"[DONE]"
PING = b": ping\n\n"
"""A comment: clients ignore it, and it keeps a stream alive."""
STREAM_HEADERS: Mapping[str, str] = MappingProxyType(
    # Without the second one, buffering reverse proxies would undo the streaming.
    {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"}
)

_BOUNDARIES = (b"\n\n", b"\r\n\r\n", b"\r\r")
_SET = re.compile(rb'(?:error|usage|finish_reason)"\s*:\s*[^\sn]')
"""A relevant member that isn't null."""
_LETTER = re.compile(rb"\\u00[4-7]")
"""An escaped letter, which may be part of such a member's name."""
_IN_LINES = re.compile(rb"[^\r\n](?:\r\n|\n|\r)data")
"""An event whose data has several lines, which must be joined."""


class EventSplitter:
    """Cuts a byte stream into whole events, in linear time.

    Args:
        longest: bytes of the longest event; None for no limit.
    """

    def __init__(self, longest: int | None = None) -> None:
        self._longest = longest
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the events that ``chunk`` completes, each with its terminator.

        Raises:
            AnswerTooLargeError: the last event is incomplete and already too long.
        """
        self._buffer += chunk
        events: list[bytes] = []
        cursor = 0
        search = max(0, self._searched - _LONGEST_BOUNDARY + 1)
        while match := _BOUNDARY.search(self._buffer, max(search, cursor)):
            events.append(bytes(self._buffer[cursor : match.end()]))
            cursor = match.end()
        del self._buffer[:cursor]
        self._searched = len(self._buffer)
        if self._longest is not None and self._searched > self._longest:
            raise AnswerTooLargeError(
                f"An event of the engine's is longer than {self._longest} bytes (max_event_bytes)."
            )
        return events

    @property
    def empty(self) -> bool:
        """True if no partial event is buffered."""
        return not self._buffer

    def rest(self) -> bytes:
        """Return the bytes after the last whole event, and empty the splitter."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        return rest


def tells_nothing(chunk: bytes) -> bool:
    """Return True if bytes that begin with an event are whole events of only tokens and comments.

    None of them has a usage, an error or a finish reason, or ends the stream.
    """
    if b"\r" in chunk:
        joined = _IN_LINES.search(chunk) is not None
    else:
        joined = chunk.count(b"\ndata") != chunk.count(b"\n\ndata")
    return (
        chunk.endswith(_BOUNDARIES)
        and not joined
        and b"[DONE]" not in chunk
        and _SET.search(chunk) is None
        and (b"\\u00" not in chunk or _LETTER.search(chunk) is None)
    )


def event_data(event: bytes) -> bytes:
    """Return the event's ``data`` lines, joined; empty for comments and keep-alives."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line[:5] == b"data:"]
    return b"\n".join(lines)


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """Facts that the proxy needs about one completion chunk."""

    bears_token: bool = False
    """True if a choice has more than the opening role."""
    finishes: bool = False
    """True if one of its choices has a ``finish_reason``."""
    is_text: bool = False
    """True if no choice ends for calls."""
    usage: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None


TEXT_ENDS = (None, "stop", "length")
"""Finish reasons of answers without calls; None before the end."""


class _Choice(msgspec.Struct):
    # Some servers write empty texts or lists in place of null and of empty objects.
    finish_reason: Any = None
    delta: Any = None
    text: Any = None

    def bears_token(self) -> bool:
        delta = self.delta if isinstance(self.delta, dict) else {}
        said = self.text or any(value for name, value in delta.items() if name != "role")
        return bool(said) or bool(self.finish_reason)


def is_text(answer: Mapping[str, Any]) -> bool:
    """Return True if a whole answer has no calls."""
    choices = answer.get("choices")
    return isinstance(choices, list) and all(
        isinstance(choice, dict) and choice.get("finish_reason") in TEXT_ENDS for choice in choices
    )


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


def chunk_facts(event: bytes) -> ChunkFacts:
    """Read a chunk; data that isn't a JSON completion chunk has no facts."""
    data = event_data(event)
    if not data or data == DONE:
        return ChunkFacts()
    try:
        chunk = _decoder.decode(data)
    except msgspec.DecodeError:
        return ChunkFacts()
    error = chunk.error if chunk.error is None or isinstance(chunk.error, dict) else {}
    choices = chunk.choices or ()
    return ChunkFacts(
        bears_token=any(choice.bears_token() for choice in choices),
        finishes=any(choice.finish_reason for choice in choices),
        is_text=all((choice.finish_reason or None) in TEXT_ENDS for choice in choices),
        usage=chunk.usage if isinstance(chunk.usage, dict) else None,
        error=error,
    )


def with_data(event: bytes, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> bytes:
    """Return an event with other data; unchanged if its data is no JSON object."""
    try:
        data = msgspec.json.decode(event_data(event))
    except msgspec.DecodeError:
        return event
    if not isinstance(data, dict):
        return event
    # Not orjson: numbers may have any size.
    return b"data: %b\n\n" % msgspec.json.encode(change(data))


def take_from_event(event: bytes, name: str) -> tuple[bytes, bytes | None]:
    """Return ``event`` without the member ``name`` of its JSON object, and the member's value.

    Return the event unchanged, and None, if its data isn't one line of JSON with that member.
    """
    if name.encode() not in event:
        return event, None
    start, end = _object_in(event)
    data, value = take_member(event[start:end], name)
    return (event if value is None else event[:start] + data + event[end:]), value


def append_to_event(event: bytes, members: Mapping[str, Any]) -> bytes:
    """Return ``event`` with ``members`` in its JSON object, all other bytes unchanged.

    Return the event unchanged if its data isn't one line of JSON.
    """
    start, end = _object_in(event)
    if start == end:
        return event
    encoded = {name: orjson.dumps(value) for name, value in members.items()}
    return event[:start] + put_members(event[start:end], encoded) + event[end:]


def _object_in(event: bytes) -> tuple[int, int]:
    """Return the range of the event's JSON object; an empty range if it isn't one line."""
    start, end = event.find(b"{"), event.rfind(b"}") + 1
    one = 0 <= start < end and b"\n" not in event[start:end] and b"\r" not in event[start:end]
    return (start, end) if one else (0, 0)
