"""A bounded memory of the prompt texts of single messages.

All conversations and tenants of a renderer share it, like the tokenizer's memory: a caller who can
time a turn to the millisecond may learn that a message was rendered before. It holds prompt text,
only in the process's memory, until it is the least recently used or a session that has it forgets.
"""

from __future__ import annotations

import marshal
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...model.text_memory import NO_SESSION, Left, Reader, TextMemory

MAX_REMEMBERED_BYTES = 128 << 20
"""Bound of the memory; the least recently used messages go first."""

READER_BYTES = 256
"""Approximate bytes for each further session that has a text."""

_OVERHEAD = 1024
"""Approximate bytes of a message or a fragment besides its texts."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """The text of one iteration of a loop, and its side effects."""

    text: str
    span: tuple[int, int] | None
    """Characters of the text that are the item's content."""
    marked: bool
    """True if any of the item's content was written; without a span, it can't be located."""
    located: bool
    """False if marks changed the text, so they can't locate any content."""
    after: tuple[Any, ...]
    """Values of the written namespace attributes afterwards."""

    @property
    def weight(self) -> int:
        """Approximate bytes in memory."""
        return _OVERHEAD + 2 * len(self.text)


class MessageEntry:
    """A message as the client wrote it, with everything remembered about it."""

    __slots__ = ("fragments", "key", "marked", "normal", "weight")

    def __init__(self, key: bytes, normal: Mapping[str, Any]) -> None:
        self.key = key
        self.normal = normal
        """The message as templates see it."""
        self.fragments: dict[Hashable, Fragment] = {}
        self.marked: tuple[tuple[int, str], Mapping[str, Any]] | None = None
        """The message with marks, together with its index and the marks."""
        self.weight = _OVERHEAD + 3 * len(key)

    def twin(self) -> MessageEntry:
        """Return the same entry with another object, for a message that is in the list again."""
        twin = MessageEntry(self.key, {**self.normal})
        twin.fragments = self.fragments
        return twin


@dataclass(slots=True)
class Conversation:
    """The remembered entries of a list's messages, each with its own object."""

    entries: list[MessageEntry] = field(default_factory=list)
    places: dict[int, tuple[MessageEntry, int]] = field(default_factory=dict)
    """Each entry and its index, by the identity of the message as templates see it."""
    seen: set[bytes] = field(default_factory=set)
    weight: int = 0
    """Approximate bytes in memory."""

    def copy(self) -> Conversation:
        """Return a copy that can be extended."""
        return Conversation([*self.entries], {**self.places}, {*self.seen}, self.weight)

    def add(self, key: bytes, entry: MessageEntry) -> None:
        """Append a message."""
        own = entry.twin() if key in self.seen else entry
        self.places[id(own.normal)] = (own, len(self.entries))
        self.entries.append(own)
        self.seen.add(key)
        self.weight += _OVERHEAD + 6 * len(key)


class FragmentMemory:
    """Entries by message. Safe to use from several threads."""

    def __init__(self, max_bytes: int = MAX_REMEMBERED_BYTES) -> None:
        self._entries: TextMemory[bytes, MessageEntry] = TextMemory(
            max_bytes, reader_weight=READER_BYTES
        )

    @property
    def remembered_bytes(self) -> int:
        """Approximate bytes in memory now."""
        return self._entries.weight

    def find(self, keys: Sequence[bytes], reader: Reader = NO_SESSION) -> list[MessageEntry | None]:
        """Return the entry of each message, or None; ``keys`` are from :func:`key_of`."""
        return self._entries.find(keys, reader)

    def add(self, entry: MessageEntry, reader: Reader = NO_SESSION) -> MessageEntry:
        """Store a message, and return the stored entry."""
        return self._entries.put(entry.key, entry, entry.weight, reader)

    def remember(self, entry: MessageEntry, key: Hashable, fragment: Fragment) -> None:
        """Add a fragment to a message, unless that was forgotten meanwhile."""
        with self._entries.lock:
            known = self._entries.get(entry.key)
            if known is None or known.fragments is not entry.fragments or key in known.fragments:
                return
            known.fragments[key] = fragment
            self._entries.grow(entry.key, fragment.weight)

    def forget(self, tenant: str, session: str, demands: int | None) -> None:
        """Drop a session's messages; see
        :meth:`~leyline_proxy.model.text_memory.TextMemory.forget`."""
        self._entries.forget(tenant, session, demands)

    def left(self, tenant: str, session: str, demands: int) -> Left:
        """Return the number of a session's messages."""
        return self._entries.left(tenant, session, demands)


def key_of(value: Any) -> bytes | None:
    """Return the value as bytes; None if it has more than JSON's types, tuples and bytes.

    The bytes include types, the order of members and the sign of zero, so values with equal keys
    look equal to a template.
    """
    try:
        return marshal.dumps(value, 2)  # version 2: the same bytes for shared objects
    except ValueError:
        return None
