"""The tool calls of a streamed chat completion, put together from their parts. Pure.

A call should have an index, and an id and a name in its first part. Engines and gateways leave out
the index or give all calls the same, repeat the id or make up a new one for each part, repeat the
name or split it, and send parts of several calls in turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .chat_answers import arguments_text, text_or_none

_MARKS = re.compile(r'["\\{}\[\]]')


class StreamedCall:
    """A call so far, without its arguments.

    Args:
        number: its place among the calls, from 0.
        index: the engine's number; None if it gives none.
    """

    __slots__ = (
        "_depth",
        "_escaped",
        "_in_text",
        "begun",
        "id",
        "index",
        "name",
        "number",
        "whole",
    )

    def __init__(self, number: int, index: int | None) -> None:
        self.number = number
        self.index = index
        self.id: str | None = None
        self.name = ""
        """The name so far; whole once the arguments have begun."""
        self.begun = False
        """True if some of the arguments have come."""
        self.whole = False
        """True if the arguments are a whole JSON value."""
        self._depth = 0
        self._in_text = self._escaped = False

    @property
    def nameless(self) -> bool:
        """True if the call can't be made: it has no name, but an id or arguments."""
        return not self.name and bool(self.begun or self.id)

    def add(self, name: str, arguments: str) -> None:
        """Add a part."""
        if name and name != self.name and not (self.begun and self.name):
            # Servers that repeat a name may repeat as much of it as they have.
            self.name = name if name.startswith(self.name) else self.name + name
        self.begun = self.begun or bool(arguments)
        if not self.whole:
            self._scan(arguments)

    def _scan(self, text: str) -> None:
        position = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while not self.whole and (found := _MARKS.search(text, position)):
            position, mark = found.end(), found[0]
            if self._in_text:
                self._in_text = mark != '"'
                if mark == "\\":
                    self._escaped = position == len(text)
                    position += 1
            elif mark == '"':
                self._in_text = True
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                self.whole = self._depth <= 0


class StreamedCalls:
    """Finds the call of each part. Memory grows with the number of calls, not with arguments."""

    def __init__(self) -> None:
        self.calls: list[StreamedCall] = []
        self._by_id: dict[str, StreamedCall] = {}
        self._by_index: dict[int, StreamedCall] = {}
        """The latest of each index."""

    def take(self, part: Mapping[str, Any]) -> tuple[StreamedCall, str] | None:
        """Return the call to which a part belongs and the arguments that it adds; None if the part
        says nothing."""
        function = part.get("function")
        function = function if isinstance(function, Mapping) else {}
        identifier = _identifier(part.get("id"))
        name = text_or_none(function.get("name")) or ""
        arguments = arguments_text(function.get("arguments"))
        index = _index(part.get("index"))
        if not (identifier or name or arguments) and (index is None or index in self._by_index):
            return None
        call = self._known(index, identifier, name)
        if call is None or _is_another(call, index, identifier, name, arguments):
            call = self._new(index)
        if identifier and call.id is None and identifier not in self._by_id:
            call.id = identifier
        if identifier:
            self._by_id[identifier] = call
        if call.whole and name and identifier and identifier == call.id:
            arguments = ""  # the whole call once more, at its end
        if arguments == "null" and not call.begun:
            arguments = ""
        call.add(name, arguments)
        return call, arguments

    def _new(self, index: int | None) -> StreamedCall:
        call = StreamedCall(len(self.calls), index)
        self.calls.append(call)
        if index is not None:
            self._by_index[index] = call
        return call

    def _known(self, index: int | None, identifier: str | None, name: str) -> StreamedCall | None:
        """Return the call that a part may belong to."""
        named = self._by_id.get(identifier) if identifier else None
        if index is not None:
            found = self._by_index.get(index)
            if found is not None and named is not None and found.id not in (None, identifier):
                return named
            fits = named is not None and (named.index is None or not name)
            return found or (named if fits else None)
        latest = self.calls[-1] if self.calls else None
        if identifier is None or named is not None:
            return named or latest
        # An id that comes after the name.
        fits = latest is not None and latest.id is None and not latest.whole and not name
        return latest if fits else None


def _is_another(
    call: StreamedCall, index: int | None, identifier: str | None, name: str, arguments: str
) -> bool:
    """Return True if a part begins another call than the one that its number or id suggests."""
    if identifier and call.id and identifier != call.id:
        # Some servers make up an id for each part, but none a name with it.
        return call.whole or bool(name)
    if not name or not call.name or identifier:
        return False
    if call.whole:
        return index is None or bool(arguments.strip()) or name != call.name
    if index is None:
        return name != call.name or not call.begun
    return call.begun and name != call.name


def _index(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value[:9])
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _identifier(value: object) -> str | None:
    return str(value) if isinstance(value, str | int) and str(value) else None
