"""Reading a body that continues an earlier one, without decoding the common part again.

An agent's request repeats the last one's messages byte for byte and adds some. The longest run of
whole messages at the start of both bodies is taken over as objects; the rest is decoded. The result
equals decoding the whole body.

::

    before   {"model":…,"messages":[{…},{…},{…}],"tools":…}
    now      {"model":…,"messages":[{…},{…},{…},{…},{…}],"tools":…}
             ╰──── the same bytes ────────────╯╰── decoded ────────╯
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from secrets import token_hex
from sys import getsizeof
from threading import Lock
from typing import Any

import msgspec
import xxhash

from ..model.messages import Message, fingerprint
from ..model.text_memory import Left, Owner, Reader, left_of
from .values import decode, most_values
from .wire import split_body

MAX_REMEMBERED_BYTES = 64 << 20
"""Bound of the remembered bodies; the least recently read go first."""

_SHORTEST = 1024
"""Length of the shortest beginning that bodies are found by."""
_STEP = 1.5
_NOTES_WEIGHT = 200
"""Bytes in memory of what is noted of a message."""
_TEXT_WEIGHT = 4
"""Bytes in memory, at most, that a byte of a text becomes."""
_VALUE_WEIGHT = 80
"""Bytes in memory of objects, at most, per value that :func:`~.values.most_values` counts."""
_SPACE = b" \t\n\r"


@dataclass(slots=True, eq=False)
class ReadBody:
    """A body and its decoded content."""

    raw: bytes
    members: dict[str, Any]
    """The decoded members, ``messages`` included; neither they nor their values may be changed."""
    messages: list[Message]
    fingerprints: tuple[int, ...] = ()
    """Fingerprints of the messages that were in an earlier body; of all after :meth:`complete`."""
    known: int = 0
    """Number of leading messages from an earlier body, which had passed all checks."""
    head: dict[str, Any] = field(default_factory=dict)
    """Members before the messages, including those repeated after them."""
    ends: array[int] = field(default_factory=lambda: array("q"))
    """The end of each message in the body."""
    chains: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    """Chains of the messages, by key; see :func:`~.identity.history_chain`."""
    marks: tuple[tuple[int, int], ...] = ()
    """Lengths of the body's beginnings, and their hashes."""

    begin: int = 0
    """The place of the first message in the body, or of white space in front of it."""
    sizes: array[int] = field(default_factory=lambda: array("q"))
    """Bytes in memory of each message, as far as :meth:`complete` has seen them."""

    @property
    def weight(self) -> int:
        """Bytes in memory of the body and its objects, approximately. Messages that an earlier body
        has, too, count here as well: they may outlive it."""
        others = (self.raw[: self.begin], self.raw[self.ends[-1] :] if self.ends else b"")
        return (
            len(self.raw)
            + sum(self.sizes)
            + _NOTES_WEIGHT * len(self.sizes)
            + sum(_TEXT_WEIGHT * len(each) + _VALUE_WEIGHT * most_values(each) for each in others)
        )

    def complete(self) -> None:
        """Record the facts of all messages, which have passed all checks."""
        added = self.messages[self.known :]
        self.fingerprints = (*self.fingerprints, *map(fingerprint, added))
        self.sizes.extend(map(_size, added))


class BodyMemory:
    """Bodies that later ones may continue, by owner. Safe to use from several threads.

    Args:
        max_bytes: approximate bound of the remembered bodies.
    """

    def __init__(self, max_bytes: int = MAX_REMEMBERED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._bodies: OrderedDict[int, tuple[Reader, ReadBody, int]] = OrderedDict()
        self._of: dict[Owner, int] = {}
        """The newest body of each session."""
        self._lock = Lock()
        """Held while the bodies change, not while one is read."""
        self._by_mark: dict[tuple[str, int, int], ReadBody] = {}
        # A name that no client can know, for the part of a list that is decoded separately.
        self._member = token_hex()

    @property
    def remembered_bytes(self) -> int:
        """Approximate bytes in memory now."""
        return self._bytes

    def read(self, owner: str, raw: bytes) -> ReadBody | None:
        """Return the content of ``raw``, with the help of an earlier body of the same owner.

        None if there is no earlier body, or if only plain decoding can judge this one.
        """
        marks = tuple(_marks(raw))
        former = next(
            filter(None, (self._by_mark.get((owner, *mark)) for mark in marks[::-1])), None
        )
        if former is None:
            return None
        shared = _shared(former, raw)
        found = self._go_on(former, shared, raw) if shared else None
        if found is not None:
            found.marks = marks
            with self._lock:
                if id(former) in self._bodies:
                    self._bodies.move_to_end(id(former))
        return found

    def remember(self, reader: Reader, body: ReadBody) -> None:
        """Let later bodies continue this one, which has passed all checks and is complete.

        Of a session only the newest is remembered, so that text that left its list is gone.
        """
        if reader.session:
            self.forget(*reader.owner, but=body)
        if id(body) in self._bodies or (not body.ends and not _locate(body)):
            return
        if not body.marks:
            body.marks = tuple(_marks(body.raw))
        weight = body.weight
        with self._lock:
            for mark in body.marks:
                former = self._by_mark.get((reader.tenant, *mark))
                if former is not None and _is_beginning(former, body):
                    self._forget(former)
                self._by_mark[reader.tenant, *mark] = body
            if body.marks:
                self._bodies[id(body)] = reader, body, weight
                self._bytes += weight
                if reader.session:
                    self._of[reader.owner] = id(body)
            while self._bytes > self._max_bytes:
                self._forget(next(iter(self._bodies.values()))[1])

    def forget(
        self, tenant: str, session: str, demands: int | None = None, *, but: ReadBody | None = None
    ) -> None:
        """Drop a session's body.

        Args:
            demands: only one of a turn up to these demands; None for any.
            but: stays.
        """
        with self._lock:
            held = self._bodies.get(self._of.get((tenant, session), 0))
            if held is None or held[1] is but:
                return
            if demands is None or held[0].demands <= demands:
                self._forget(held[1])

    def left(self, tenant: str, session: str, demands: int) -> Left:
        """Return the number of a session's bodies."""
        held = self._bodies.get(self._of.get((tenant, session), 0))
        return left_of([held[0].demands] if held is not None else [], demands)

    def _forget(self, body: ReadBody) -> None:
        held = self._bodies.pop(id(body), None)
        if held is None:
            return
        self._bytes -= held[2]
        if self._of.get(held[0].owner) == id(body):
            del self._of[held[0].owner]
        for mark in body.marks:
            if self._by_mark.get((held[0].tenant, *mark)) is body:
                del self._by_mark[held[0].tenant, *mark]

    def _go_on(self, former: ReadBody, shared: int, raw: bytes) -> ReadBody | None:
        rest = raw[former.ends[shared - 1] :].lstrip(_SPACE)
        more = rest[:1] == b","
        if not more and rest[:1] != b"]":
            return None
        tail = b'{"%b":[%b' % (self._member.encode(), rest[1:] if more else rest)
        try:
            members = decode(tail)
            added = members.pop(self._member)
            items = msgspec.json.decode(split_body(tail)[self._member], type=list[msgspec.Raw])
        except (ValueError, RecursionError):
            return None
        # A list with nothing after its comma isn't JSON, and a second list replaces the first.
        if more == (not added) or "messages" in members:
            return None
        messages = [*former.messages[:shared], *added]
        ends = former.ends[:shared]
        _note_ends(raw, items, ends, ends[-1])
        return ReadBody(
            raw,
            {**former.head, "messages": messages, **members},
            messages,
            former.fingerprints[:shared],
            known=shared,
            head=former.head,
            ends=ends,
            begin=former.begin,
            sizes=former.sizes[:shared],
            chains={key: chain[:shared] for key, chain in former.chains.copy().items()},
        )


def _size(message: Message) -> int:
    """Return the bytes in memory of a message's objects; shared names of members count, too."""
    size, rest = 0, [message]
    while rest:
        each: Any = rest.pop()
        size += getsizeof(each)
        if isinstance(each, dict):
            size += sum(map(getsizeof, each))
            rest += each.values()
        elif isinstance(each, list):
            rest += each
    return size


def _marks(raw: bytes) -> Iterator[tuple[int, int]]:
    """Yield the lengths and hashes of ever longer beginnings."""
    state = xxhash.xxh3_64()
    done, length = 0, _SHORTEST
    while length <= len(raw):
        state.update(raw[done:length])
        yield length, state.intdigest()
        done, length = length, int(length * _STEP)


def _shared(former: ReadBody, raw: bytes) -> int:
    """Return the number of leading messages that both bodies share, byte for byte, with everything
    before them."""
    before, ends = former.raw, former.ends
    if not ends:
        return 0
    if raw.startswith(before[: ends[-1]]):
        return len(ends)
    low, high, begin = 0, len(ends) - 1, 0  # as many are shared, and not one more than
    while low < high:
        middle = (low + high + 1) // 2
        if raw[begin : ends[middle - 1]] == before[begin : ends[middle - 1]]:
            low, begin = middle, ends[middle - 1]
        else:
            high = middle - 1
    return low


def _is_beginning(former: ReadBody, body: ReadBody) -> bool:
    """Return True if every body that could continue ``former`` can also continue ``body``."""
    count = len(former.messages)
    return count <= body.known and former.ends[count - 1] == body.ends[count - 1]


def _locate(body: ReadBody) -> bool:
    """Find the end of each message; return False if uncertain."""
    raw = body.raw
    members = split_body(raw)
    value = bytes(members["messages"])
    start = raw.find(value)
    if raw.find(value, start + 1) >= 0:
        return False  # the same bytes occur elsewhere
    items = msgspec.json.decode(value, type=list[msgspec.Raw])
    _note_ends(raw, items, body.ends, start)
    body.begin = start + 1
    try:
        # The part before the list, closed as an object.
        body.head = decode(raw[:start] + b"null}")
    except ValueError:
        return False
    return True


def _note_ends(raw: bytes, items: list[msgspec.Raw], ends: array[int], cursor: int) -> None:
    for item in items:
        # Between two items there is nothing that could begin an object.
        written = bytes(item)
        cursor = raw.find(written, cursor) + len(written)
        ends.append(cursor)
