"""Sessions as bytes: everything needed to continue them, compressed.

::

    "LYS" │ version, 1 byte │ zstd frame with checksum over a MessagePack record

The record is the session itself, except for two kinds of content. Members that may hold any JSON
are stored as JSON, whose numbers have no bound. Objects that turns share are stored once, in lists
that turns refer to by place, so that they become the same objects again. The compressor finds other
repetitions between turns, however far apart.

Bytes of another version, or damaged ones, are no session: the reader has a miss, and the
conversation continues as an ordinary prefill.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import zstandard

from ..model.messages import Message, fingerprint
from ..model.prepared import Change, Fingerprinted, Prepared, SentMessage
from ..model.session import RetainedTurn, Session
from ..model.spans import SpanName, SpanNames

FORMAT = 12
"""Version in every session; another one is a miss. Change it with any change of stored content."""

MAX_RECORD = 1 << 28
"""Largest record in bytes, before compression: four turns of the longest body taken by default. A
larger session isn't stored, and a frame that claims more isn't opened."""

UNENCODABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
"""Errors of :func:`encode_session`."""

_HEAD = b"LYS" + bytes([FORMAT])
_LEVEL = 3
_MAX_WINDOW = 27  # bits; a decompressor refuses more
_Item = TypeVar("_Item")
States = Mapping[str, Mapping[str, Any]]
Pins = dict[int, dict[str, Any]]
_Label = tuple[str, ...]


class Sent(msgspec.Struct, array_like=True, frozen=True):
    """A :class:`~leyline_proxy.model.prepared.SentMessage`."""

    message: int
    client_index: int | None
    changes: tuple[Change, ...]
    moved_from: int | None


class _Turn(msgspec.Struct, array_like=True, frozen=True):
    """A turn, and the parts taken out of it."""

    bare: RetainedTurn
    client: tuple[int, ...]
    sent: tuple[int, ...]
    names: tuple[int, ...]
    labels: tuple[int, ...]
    wanted: tuple[tuple[int, ...], ...]
    """Places of each completion's messages."""
    receipt: int | None
    """Place of the turn's account that has the same receipt, if any."""
    states: bytes
    pins: bytes


class _Record(msgspec.Struct, array_like=True, frozen=True):
    """A session, and the parts taken out of it."""

    bare: Session
    states: bytes
    turns: tuple[_Turn, ...]
    messages: list[bytes]
    prints: list[int]
    """Fingerprints of the messages."""
    sent: list[Sent]
    names: list[SpanName]
    labels: list[_Label]


def encode_session(session: Session) -> bytes:
    """Return the session as bytes, without the turns in flight, which a store tracks itself.

    Raises:
        UNENCODABLE: it has content that no request could contain.
    """
    record = encode(_Writer(session).write())
    if len(record) > MAX_RECORD:
        raise ValueError("the session is too long")
    return _HEAD + compress(record)


def decode_session(data: bytes) -> Session | None:
    """Return the session; None if the bytes are of another version or damaged."""
    if not data.startswith(_HEAD):
        return None
    try:
        record = decompress(memoryview(data)[len(_HEAD) :])
        return _Reader(_DECODER.decode(record)).read()
    except (zstandard.ZstdError, LookupError, MemoryError, *UNENCODABLE):
        return None


def compress(record: bytes) -> bytes:
    """Return a zstd frame with a checksum."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL,
        source_size=len(record),
        # As long as the record, so that no turn is too far from another.
        window_log=min(max(len(record).bit_length(), zstandard.WINDOWLOG_MIN), _MAX_WINDOW),
        enable_ldm=True,
        write_checksum=True,
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(record)


def decompress(frame: bytes | memoryview) -> bytes:
    """Return the content of a frame.

    Raises:
        zstandard.ZstdError: it is damaged, or claims to be too long.
    """
    if not 0 <= zstandard.frame_content_size(frame) <= MAX_RECORD:
        raise zstandard.ZstdError("a frame of that length")
    return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)


class _Writer:
    """Takes the parts out of a session that its record stores separately."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._receipts = {id(each.receipt): at for at, each in enumerate(session.history)}
        self._known: dict[int, int] = {}
        self._messages: dict[bytes, int] = {}
        self._prints: list[int] = []
        self._sent: dict[Sent, int] = {}
        self._names: dict[SpanName, int] = {}
        self._labels: dict[_Label, int] = {}

    def write(self) -> _Record:
        """Return the record."""
        session = self._session
        return _Record(
            bare=bare_session(session),
            states=msgspec.json.encode(session.policy_states),
            # The newest first: older turns then refer to objects that they share with it.
            turns=tuple(map(self._turn, reversed(session.turns))),
            messages=list(self._messages),
            prints=self._prints,
            sent=list(self._sent),
            names=list(self._names),
            labels=list(self._labels),
        )

    def _turn(self, turn: RetainedTurn) -> _Turn:
        prepared, receipt = turn.prepared, self._receipts.get(id(turn.receipt))
        bare = replace(
            turn,
            prepared=bare_prepared(prepared),
            names=SpanNames(),
            receipt=turn.receipt if receipt is None else None,
        )
        return _Turn(
            bare=bare,
            client=tuple(map(self._message, prepared.client)),
            sent=tuple(map(self._entry, prepared.sent)),
            names=tuple(_place(self._names, name) for name in turn.names.client),
            labels=tuple(_place(self._labels, label) for label in turn.names.sent),
            wanted=tuple(tuple(map(self._message, each.messages)) for each in prepared.wanted),
            receipt=receipt,
            states=msgspec.json.encode(prepared.states),
            pins=msgspec.json.encode(prepared.pins),
        )

    def _message(self, message: Message) -> int:
        place = self._known.get(id(message))
        if place is None:
            place = _place(self._messages, msgspec.json.encode(message))
            self._known[id(message)] = place
            if place == len(self._prints):
                self._prints.append(fingerprint(message))
        return place

    def _entry(self, entry: SentMessage) -> int:
        place = self._message(entry.message)
        stored = Sent(place, entry.client_index, entry.changes, entry.moved_from)
        return _place(self._sent, stored)


class _Reader:
    """Puts the parts back that a record stores separately."""

    def __init__(self, record: _Record) -> None:
        self._record = record
        self._messages: list[Message] = list(map(msgspec.json.decode, record.messages))
        self._sent = [
            SentMessage(
                self._messages[each.message], each.client_index, each.changes, each.moved_from
            )
            for each in record.sent
        ]

    def read(self) -> Session:
        """Return the session.

        Raises:
            ValueError, LookupError, TypeError, msgspec.MsgspecError: the record is invalid.
        """
        record = self._record
        turns = tuple(map(self._turn, reversed(record.turns)))
        states = msgspec.json.decode(record.states, type=States)
        return replace(record.bare, turns=turns, policy_states=states)

    def _turn(self, stored: _Turn) -> RetainedTurn:
        record, bare = self._record, stored.bare
        names = SpanNames(_take(record.names, stored.names), _take(record.labels, stored.labels))
        holder = bare if stored.receipt is None else record.bare.history[stored.receipt]
        return replace(bare, prepared=self._prepared(stored), names=names, receipt=holder.receipt)

    def _prepared(self, stored: _Turn) -> Prepared:
        bare, messages, prints = stored.bare.prepared, self._messages, self._record.prints
        client, sent = _take(messages, stored.client), _take(self._sent, stored.sent)
        sent_messages = [each.message for each in _take(self._record.sent, stored.sent)]
        wanted = zip(bare.wanted, stored.wanted, strict=True)
        return replace(
            bare,
            client=client,
            sent=sent,
            states=msgspec.json.decode(stored.states, type=States),
            pins=msgspec.json.decode(stored.pins, type=Pins),
            wanted=tuple(replace(each, messages=_take(messages, own)) for each, own in wanted),
            known_fingerprints=(
                Fingerprinted(client, _take(prints, stored.client)),
                Fingerprinted(sent, _take(prints, sent_messages)),
            ),
        )


def bare_session(session: Session) -> Session:
    """Return a session without turns, and members that may hold any JSON."""
    return replace(session, turns=(), policy_states={}, in_flight=frozenset())


def bare_prepared(prepared: Prepared) -> Prepared:
    """Return ``prepared`` without messages and members that may hold any JSON."""
    return replace(
        prepared,
        client=(),
        sent=(),
        states={},
        wanted=tuple(replace(each, messages=()) for each in prepared.wanted),
        pins={},
        refused=None,
        evicted=(),
        working_set=None,
        known_fingerprints=(),
    )


def _place(places: dict[_Item, int], item: _Item) -> int:
    """Return an item's place in the order of first use."""
    return places.setdefault(item, len(places))


def _take(items: Sequence[_Item], places: Iterable[int]) -> tuple[_Item, ...]:
    return tuple(map(items.__getitem__, places))


def _pack(ids: object) -> bytes:
    """Pack token ids, signed 64-bit, into as many low bytes of each as all need.

    That number comes first. Little endian, like the machine.
    """
    if not isinstance(ids, array) or ids.typecode != "q":
        raise TypeError("no token ids")
    # Copying strides of bytes is five times as fast as item by item.
    wide, zeros = ids.tobytes(), bytes(len(ids))
    width = max((at + 1 for at in range(8) if wide[at::8] != zeros), default=1)
    packed = bytearray(width * len(ids))
    for at in range(width):
        packed[at::width] = wide[at::8]
    return bytes([width]) + packed


def _unpack(kind: type, packed: object) -> array[int]:
    if kind is not array or not isinstance(packed, bytes) or not 1 <= packed[0] <= 8:
        raise TypeError("no token ids")
    width = packed[0]
    wide = bytearray((len(packed) - 1) // width * 8)
    for at in range(width):
        wide[at::8] = packed[1 + at :: width]
    return array("q", wide)[:]  # unlike the first array, a copy has no spare room


encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
"""Returns MessagePack; token ids are packed."""


def decoder(kind: type[_Item]) -> msgspec.msgpack.Decoder[_Item]:
    """Return a decoder of what :func:`encode` has made."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_unpack)


# Made here, so that a type that can't be stored fails the import, not each session.
_DECODER = decoder(_Record)
