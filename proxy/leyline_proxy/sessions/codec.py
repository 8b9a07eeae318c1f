"""Sessions as bytes: everything needed to continue them, compressed.

::

    "LYS" │ version, 1 byte │ zstd frame with checksum over a MessagePack record

The record is the session itself, except for two kinds of content. Members that may hold any JSON
are stored as JSON, whose numbers have no bound. Objects that turns share are stored once, in lists
that turns refer to by place, so that they become the same objects again. The compressor finds other
repetitions between turns, however far apart.

Bytes of another version, or damaged ones, are no session: the reader has a miss, and the
conversation continues as an ordinary prefill.

Workers of one proxy exchange sessions in pieces instead, uncompressed: a head, and one for each
turn. A turn never changes, so that a session's next version needs only the newest one.
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

FORMAT = 11
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
_States = Mapping[str, Mapping[str, Any]]
_Pins = dict[int, dict[str, Any]]
_Label = tuple[str, ...]


class _Sent(msgspec.Struct, array_like=True, frozen=True):
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
    sent: list[_Sent]
    names: list[SpanName]
    labels: list[_Label]


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """A session without turns."""

    bare: Session
    states: bytes


class _Piece(msgspec.Struct, array_like=True, frozen=True):
    """A turn, and the parts taken out of it; see :class:`_Record`."""

    turn: _Turn
    messages: list[bytes]
    prints: list[int]
    sent: list[_Sent]
    names: list[SpanName]
    labels: list[_Label]


def encode_session(session: Session) -> bytes:
    """Return the session as bytes, without the turns in flight, which a store tracks itself.

    Raises:
        UNENCODABLE: it has content that no request could contain.
    """
    record = _ENCODER.encode(_Writer(session).write())
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


def encode_head(session: Session) -> bytes:
    """Return a session without its turns.

    Raises:
        UNENCODABLE: it has content that no request could contain.
    """
    return _ENCODER.encode(_Head(_bare_session(session), _states(session)))


def encode_turn(turn: RetainedTurn) -> bytes:
    """Return one turn of a session.

    Raises:
        UNENCODABLE: it has content that no request could contain.
    """
    writer = _Writer()
    stored = writer.turn(turn)
    piece = _ENCODER.encode(_Piece(stored, *writer.tables()))
    if len(piece) > MAX_RECORD:
        raise ValueError("the turn is too long")
    return piece


def decode_pieces(head: bytes, turns: Sequence[bytes]) -> Session | None:
    """Return a session from its head and its turns, oldest first; None if they are damaged."""
    try:
        whole = _HEAD_DECODER.decode(head)
        known: dict[bytes, Message] = {}
        # Messages that turns share become the same objects again.
        read = tuple(_Reader(_PIECE_DECODER.decode(each), known).read_turn() for each in turns)
        states = msgspec.json.decode(whole.states, type=_States)
        return replace(whole.bare, turns=read, policy_states=states)
    except (LookupError, MemoryError, *UNENCODABLE):
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

    def __init__(self, session: Session | None = None) -> None:
        self._session = session
        history = session.history if session is not None else ()
        self._receipts = {id(each.receipt): at for at, each in enumerate(history)}
        self._known: dict[int, int] = {}
        self._messages: dict[bytes, int] = {}
        self._prints: list[int] = []
        self._sent: dict[_Sent, int] = {}
        self._names: dict[SpanName, int] = {}
        self._labels: dict[_Label, int] = {}

    def write(self) -> _Record:
        """Return the record."""
        session = self._session
        assert session is not None  # noqa: S101 - only a turn is written without one
        # The newest first: older turns then refer to objects that they share with it.
        turns = tuple(map(self.turn, reversed(session.turns)))
        return _Record(_bare_session(session), _states(session), turns, *self.tables())

    def tables(self) -> tuple[list[bytes], list[int], list[_Sent], list[SpanName], list[_Label]]:
        """Return the parts that were taken out so far, in the order of a record."""
        messages, sent = list(self._messages), list(self._sent)
        return messages, self._prints, sent, list(self._names), list(self._labels)

    def turn(self, turn: RetainedTurn) -> _Turn:
        """Return a turn without its parts."""
        prepared, receipt = turn.prepared, self._receipts.get(id(turn.receipt))
        bare = replace(
            turn,
            prepared=_bare(prepared),
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
        stored = _Sent(place, entry.client_index, entry.changes, entry.moved_from)
        return _place(self._sent, stored)


class _Reader:
    """Puts the parts back that a record stores separately.

    Args:
        known: messages that were read before, by their bytes; this adds its own.
    """

    def __init__(self, record: _Record | _Piece, known: dict[bytes, Message] | None = None) -> None:
        self._record = record
        met = known if known is not None else {}
        for each in record.messages:
            if each not in met:
                met[each] = msgspec.json.decode(each)
        self._messages: list[Message] = [met[each] for each in record.messages]
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
        assert isinstance(record, _Record)  # noqa: S101 - a piece is no session
        turns = tuple(map(self._turn, reversed(record.turns)))
        states = msgspec.json.decode(record.states, type=_States)
        return replace(record.bare, turns=turns, policy_states=states)

    def read_turn(self) -> RetainedTurn:
        """Return the turn of a piece; for the errors, see :meth:`read`."""
        assert isinstance(self._record, _Piece)  # noqa: S101 - a record has several
        return self._turn(self._record.turn)

    def _turn(self, stored: _Turn) -> RetainedTurn:
        record, bare = self._record, stored.bare
        names = SpanNames(_take(record.names, stored.names), _take(record.labels, stored.labels))
        receipt = bare.receipt
        if stored.receipt is not None and isinstance(record, _Record):
            receipt = record.bare.history[stored.receipt].receipt
        return replace(bare, prepared=self._prepared(stored), names=names, receipt=receipt)

    def _prepared(self, stored: _Turn) -> Prepared:
        bare, messages, prints = stored.bare.prepared, self._messages, self._record.prints
        client, sent = _take(messages, stored.client), _take(self._sent, stored.sent)
        sent_messages = [each.message for each in _take(self._record.sent, stored.sent)]
        wanted = zip(bare.wanted, stored.wanted, strict=True)
        return replace(
            bare,
            client=client,
            sent=sent,
            states=msgspec.json.decode(stored.states, type=_States),
            pins=msgspec.json.decode(stored.pins, type=_Pins),
            wanted=tuple(replace(each, messages=_take(messages, own)) for each, own in wanted),
            known_fingerprints=(
                Fingerprinted(client, _take(prints, stored.client)),
                Fingerprinted(sent, _take(prints, sent_messages)),
            ),
        )


def _bare_session(session: Session) -> Session:
    return replace(session, turns=(), policy_states={}, in_flight=frozenset())


def _states(session: Session) -> bytes:
    return msgspec.json.encode(session.policy_states)


def _bare(prepared: Prepared) -> Prepared:
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


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_pack)
# Made here, so that a type that can't be stored fails the import, not each session.
_DECODER = msgspec.msgpack.Decoder(_Record, dec_hook=_unpack)
_HEAD_DECODER = msgspec.msgpack.Decoder(_Head, dec_hook=_unpack)
_PIECE_DECODER = msgspec.msgpack.Decoder(_Piece, dec_hook=_unpack)
