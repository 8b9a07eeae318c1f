"""From a session to its record."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Any

import msgspec

from leyline_engine.contract import Receipt
from leyline_policies.context import Completion

from ...model.messages import Message
from ...model.prepared import Prepared, SentMessage
from ...model.session import RetainedTurn, Session, TurnSummary
from .numbers import pack_places, pack_tokens
from .records import NONE, StoredSent, StoredSession, StoredSummary, StoredTurn, Wanted

_NO_PRINT = 0
"""For messages that no list needs the fingerprint of."""


class SessionWriter:
    """Fills the tables of one session."""

    def __init__(self) -> None:
        self._json = msgspec.json.Encoder()
        self._messages = _Table()
        self._by_id: dict[int, int] = {}
        self._prints = array("Q")
        self._sent = _Table()
        self._sent_by_id: dict[int, int] = {}
        self._values = _Table()
        self._receipts = _Table()
        self._names = _Table()
        self._labels = _Table()
        self._first: _Lists | None = None

    def write(self, session: Session) -> StoredSession:
        """The record.

        Raises:
            msgspec.MsgspecError, TypeError, OverflowError: it holds what no request could bring.
        """
        turns = tuple(self._turn(turn) for turn in reversed(session.turns))
        history = tuple(self._summary(summary) for summary in session.history)
        return StoredSession(
            id=session.id,
            tenant=session.tenant,
            key=session.key,
            next_index=session.next_index,
            updated=session.updated,
            created=session.created,
            unnamed=session.unnamed,
            unvouched=session.unvouched,
            demands=session.demands,
            untraced=session.untraced,
            places=session.places,
            departed=session.departed,
            policy_states=self._value(session.policy_states),
            completions=session.completions,
            history=history,
            turns=turns,
            messages=self._messages.items,
            fingerprints=self._prints.tobytes(),
            sent=self._sent.items,
            values=self._values.items,
            receipts=self._receipts.items,
            names=self._names.items,
            labels=self._labels.items,
        )

    def _turn(self, turn: RetainedTurn) -> StoredTurn:
        prepared, first = turn.prepared, self._first
        own = self._lists(turn)
        base = first or _Lists()
        if first is None:
            self._first = own
        spans = array("i", chain.from_iterable(turn.rendered.spans))
        return StoredTurn(
            turn=turn.turn,
            index=turn.index,
            tokens=pack_tokens(own.tokens, base.tokens),
            spans=spans.tobytes(),
            context=turn.rendered.context,
            output_ids=pack_tokens(array("q", turn.output_ids)),
            lineage=turn.lineage,
            receipt=self._receipt(turn.receipt),
            digest=turn.digest,
            model_fingerprint=turn.model_fingerprint,
            weight=turn.weight,
            client_names=pack_places(own.client_names, base.client_names),
            sent_names=pack_places(own.sent_names, base.sent_names),
            client=pack_places(own.client, base.client),
            sent=pack_places(own.sent, base.sent),
            dropped=tuple((item.client_index, item.change) for item in prepared.dropped),
            faults=prepared.faults,
            forget_marks=dict(prepared.forget_marks),
            notes=prepared.notes,
            states=self._value(prepared.states),
            wanted=tuple(map(self._wanted, prepared.wanted)),
            scope=prepared.scope,
            pins=self._value(prepared.pins),
            used=tuple(sorted(prepared.used)),
            replica=turn.replica,
            model=turn.model,
        )

    def _lists(self, turn: RetainedTurn) -> _Lists:
        prepared = turn.prepared
        lists = _Lists()
        lists.tokens = turn.rendered.tokens
        lists.client = array("i", self._client(prepared))
        lists.sent = array("i", self._sents(prepared))
        lists.client_names = array(
            "i", (self._names.place((name.id, name.former)) for name in turn.names.client)
        )
        lists.sent_names = array("i", map(self._labels.place, turn.names.sent))
        return lists

    def _client(self, prepared: Prepared) -> Iterable[int]:
        for message, value in zip(prepared.client, prepared.client_fingerprints, strict=True):
            yield self._message(message, value)

    def _sents(self, prepared: Prepared) -> Iterable[int]:
        for entry, value in zip(prepared.sent, prepared.sent_fingerprints, strict=True):
            known = self._sent_by_id.get(id(entry))
            if known is None:
                known = self._sent_by_id[id(entry)] = self._sent.place(self._entry(entry, value))
            yield known

    def _entry(self, entry: SentMessage, value: int) -> StoredSent:
        place = self._message(entry.message, value)
        return StoredSent(place, entry.client_index, entry.changes, entry.moved_from)

    def _message(self, message: Message, value: int = _NO_PRINT) -> int:
        place = self._by_id.get(id(message))
        if place is None:
            place = self._messages.place(self._json.encode(message))
            self._by_id[id(message)] = place
            if place == len(self._prints):
                self._prints.append(value)
        if value:
            self._prints[place] = value
        return place

    def _summary(self, summary: TurnSummary) -> StoredSummary:
        return StoredSummary(
            index=summary.index,
            turn=summary.turn,
            created=summary.created,
            planned=summary.planned,
            reason=summary.reason,
            edits=summary.edits,
            receipt=self._receipt(summary.receipt),
        )

    def _receipt(self, receipt: Receipt | None) -> int:
        return NONE if receipt is None else self._receipts.place(receipt, key=id(receipt))

    def _wanted(self, wanted: Completion) -> Wanted:
        messages = tuple(map(self._message, wanted.messages))
        return Wanted(wanted.key, messages, wanted.model, wanted.max_tokens)

    def _value(self, value: object) -> int:
        return self._values.place(self._json.encode(value))


class _Lists:
    """What a turn's lists are packed against."""

    def __init__(self) -> None:
        self.tokens = array("q")
        self.client = array("i")
        self.sent = array("i")
        self.client_names = array("i")
        self.sent_names = array("i")


class _Table:
    """Items in the order of their first use, each once."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._places: dict[Hashable, int] = {}

    def place(self, item: Any, key: Hashable | None = None) -> int:
        """Where ``item`` stands; ``key`` tells it from others where it can't itself."""
        place = self._places.setdefault(item if key is None else key, len(self.items))
        if place == len(self.items):
            self.items.append(item)
        return place
