"""Sessions in pieces, for processes that exchange them after each turn: a head, turns and messages.

A turn and a message never change, so a session's next version needs only its newest turn, and the
messages that no turn before had. Nothing is compressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from ..model.messages import Message
from ..model.prepared import Fingerprinted, Prepared, SentMessage
from ..model.session import RetainedTurn, Session
from ..model.spans import SpanName, SpanNames
from .codec import UNENCODABLE, Pins, Sent, States, bare_prepared, bare_session, decoder, encode

_FEW = 64
"""Messages that a session may keep although no turn has them any more."""


class _Head(msgspec.Struct, array_like=True, frozen=True):
    bare: Session
    states: bytes


class _Turn(msgspec.Struct, array_like=True, frozen=True):
    """A turn; messages are numbers."""

    bare: RetainedTurn
    client: tuple[int, ...]
    client_prints: tuple[int, ...]
    sent: tuple[Sent, ...]
    sent_prints: tuple[int, ...]
    names: tuple[SpanName, ...]
    labels: tuple[tuple[str, ...], ...]
    wanted: tuple[tuple[int, ...], ...]
    states: bytes
    pins: bytes


@dataclass(frozen=True, slots=True)
class Pieces:
    """A session, or what is new of it."""

    head: bytes = b""
    order: tuple[int, ...] = ()
    """Numbers of the turns, oldest first."""
    turns: Mapping[int, bytes] = field(default_factory=dict)
    messages: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        parts = (*self.turns.values(), *self.messages.values())
        return len(self.head) + sum(map(len, parts))


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The numbers of a session's turns and messages."""

    order: tuple[int, ...] = ()
    """Of its turns, oldest first."""
    messages: Mapping[int, tuple[int, Message]] = field(default_factory=dict)
    """Messages by identity, with their numbers; that keeps them in memory."""


def write(
    session: Session, before: Session | None, known: Exchanged, numbers: Iterator[int]
) -> tuple[Pieces, Exchanged, tuple[int, ...]]:
    """Return what is new of a session, all its numbers, and those of messages that it has no more.

    Args:
        before: the version that the other end has, with its numbers in ``known``.
        numbers: numbers that nobody else gives.

    Raises:
        UNENCODABLE: it has content that no request could contain.
    """
    had = dict(zip(map(id, before.turns), known.order, strict=True)) if before is not None else {}
    met, fresh = dict(known.messages), dict[int, Message]()
    turns, order = dict[int, bytes](), list[int]()
    for turn in session.turns:
        number = had.get(id(turn))
        if number is None:
            number = next(numbers)
            turns[number] = encode(_turn(turn, met, fresh, numbers))
        order.append(number)
    gone: tuple[int, ...] = ()
    if len(met) > _FEW + 2 * sum(len(turn.prepared.client) for turn in session.turns[-1:]):
        live = {id(message) for turn in session.turns for message in _messages_of(turn)}
        gone = tuple(number for key, (number, _) in met.items() if key not in live)
        met = {key: value for key, value in met.items() if key in live}
    head = encode(_Head(bare_session(session), msgspec.json.encode(session.policy_states)))
    messages = {number: msgspec.json.encode(message) for number, message in fresh.items()}
    return Pieces(head, tuple(order), turns, messages), Exchanged(tuple(order), met), gone


def read(pieces: Pieces) -> tuple[Session, Exchanged] | None:
    """Return a session and its numbers; None if the pieces are damaged."""
    try:
        messages: dict[int, Message] = {
            number: msgspec.json.decode(each) for number, each in pieces.messages.items()
        }
        head = _HEAD.decode(pieces.head)
        turns = tuple(_read_turn(pieces.turns[number], messages) for number in pieces.order)
        states = msgspec.json.decode(head.states, type=States)
        session = replace(head.bare, turns=turns, policy_states=states)
    except (LookupError, MemoryError, *UNENCODABLE):
        return None
    met = {id(message): (number, message) for number, message in messages.items()}
    return session, Exchanged(pieces.order, met)


def _turn(
    turn: RetainedTurn,
    met: dict[int, tuple[int, Message]],
    fresh: dict[int, Message],
    numbers: Iterator[int],
) -> _Turn:
    """Return a turn with numbers for messages; new ones are added to ``met`` and ``fresh``."""
    prepared = turn.prepared
    for message in _messages_of(turn):
        if id(message) not in met:
            number = next(numbers)
            met[id(message)], fresh[number] = (number, message), message
    return _Turn(
        bare=replace(turn, prepared=bare_prepared(prepared), names=SpanNames()),
        client=tuple(met[id(message)][0] for message in prepared.client),
        client_prints=prepared.client_fingerprints,
        sent=tuple(
            Sent(met[id(each.message)][0], each.client_index, each.changes, each.moved_from)
            for each in prepared.sent
        ),
        sent_prints=prepared.sent_fingerprints,
        names=turn.names.client,
        labels=turn.names.sent,
        wanted=tuple(
            tuple(met[id(message)][0] for message in each.messages) for each in prepared.wanted
        ),
        states=msgspec.json.encode(prepared.states),
        pins=msgspec.json.encode(prepared.pins),
    )


def _read_turn(piece: bytes, messages: Mapping[int, Message]) -> RetainedTurn:
    stored = _TURN.decode(piece)
    bare = stored.bare.prepared
    client = tuple(messages[number] for number in stored.client)
    sent = tuple(
        SentMessage(messages[each.message], each.client_index, each.changes, each.moved_from)
        for each in stored.sent
    )
    wanted = tuple(
        replace(each, messages=tuple(messages[number] for number in own))
        for each, own in zip(bare.wanted, stored.wanted, strict=True)
    )
    prepared = replace(
        bare,
        client=client,
        sent=sent,
        states=msgspec.json.decode(stored.states, type=States),
        pins=msgspec.json.decode(stored.pins, type=Pins),
        wanted=wanted,
        known_fingerprints=(
            Fingerprinted(client, stored.client_prints),
            Fingerprinted(sent, stored.sent_prints),
        ),
    )
    return replace(stored.bare, prepared=prepared, names=SpanNames(stored.names, stored.labels))


def _messages_of(turn: RetainedTurn) -> Iterator[Message]:
    prepared: Prepared = turn.prepared
    yield from prepared.client
    for entry in prepared.sent:
        yield entry.message
    for wanted in prepared.wanted:
        yield from wanted.messages


_HEAD = decoder(_Head)
_TURN = decoder(_Turn)
