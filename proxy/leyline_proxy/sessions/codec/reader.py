"""From a record to the session."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import starmap
from typing import Any

import msgspec

from leyline_policies.context import Completion

from ...model.messages import Message
from ...model.prepared import DroppedMessage, Fingerprinted, Prepared, SentMessage
from ...model.rendered import MessageSpan, Rendered
from ...model.session import RetainedTurn, Session, TurnSummary
from ...model.spans import SpanName, SpanNames
from .numbers import triples, unpack_places, unpack_tokens
from .records import NONE, StoredSession, StoredSummary, StoredTurn, Wanted

_Pins = dict[int, dict[str, Any]]


class SessionReader:
    """Reads the turns of one session; what they share becomes the same objects."""

    def __init__(self, stored: StoredSession) -> None:
        self._stored = stored
        self._messages: list[Message] = list(map(msgspec.json.decode, stored.messages))
        self._prints = array("Q")
        self._prints.frombytes(stored.fingerprints)
        self._sent = [
            SentMessage(
                self._messages[entry.message], entry.client_index, entry.changes, entry.moved_from
            )
            for entry in stored.sent
        ]
        self._sent_prints = [self._prints[entry.message] for entry in stored.sent]
        self._names = list(starmap(SpanName, stored.names))

    def read(self) -> Session:
        """The session.

        Raises:
            ValueError, LookupError, TypeError, msgspec.MsgspecError: the record is none.
        """
        stored = self._stored
        first = self._turn(stored.turns[0], None) if stored.turns else None
        turns = [self._turn(turn, first) for turn in reversed(stored.turns[1:])]
        return Session(
            id=stored.id,
            tenant=stored.tenant,
            key=stored.key,
            turns=tuple(turn.turn for turn in (*turns, *([first] if first else ()))),
            history=tuple(map(self._summary, stored.history)),
            next_index=stored.next_index,
            updated=stored.updated,
            created=stored.created,
            departed=stored.departed,
            policy_states=self._states(stored.policy_states),
            completions=stored.completions,
            unnamed=stored.unnamed,
            unvouched=stored.unvouched,
            demands=stored.demands,
            untraced=stored.untraced,
            places=stored.places,
        )

    def _turn(self, stored: StoredTurn, first: _Turn | None) -> _Turn:
        base = first.lists if first is not None else (None, None, None, None, None)
        tokens = unpack_tokens(stored.tokens, base[0])
        client = unpack_places(stored.client, base[1])
        sent = unpack_places(stored.sent, base[2])
        client_names = unpack_places(stored.client_names, base[3])
        sent_names = unpack_places(stored.sent_names, base[4])
        spans = array("i")
        spans.frombytes(stored.spans)
        labels, receipts = self._stored.labels, self._stored.receipts
        turn = RetainedTurn(
            turn=stored.turn,
            index=stored.index,
            prepared=self._prepared(stored, client, sent),
            rendered=Rendered(tokens, tuple(starmap(MessageSpan, triples(spans))), stored.context),
            output_ids=tuple(unpack_tokens(stored.output_ids)),
            lineage=stored.lineage,
            receipt=None if stored.receipt == NONE else receipts[stored.receipt],
            digest=stored.digest,
            model_fingerprint=stored.model_fingerprint,
            weight=stored.weight,
            names=SpanNames(
                tuple(map(self._names.__getitem__, client_names)),
                tuple(map(labels.__getitem__, sent_names)),
            ),
            replica=stored.replica,
            model=stored.model,
        )
        return _Turn(turn, (tokens, client, sent, client_names, sent_names))

    def _prepared(self, stored: StoredTurn, client: array[int], sent: array[int]) -> Prepared:
        messages = tuple(map(self._messages.__getitem__, client))
        entries = tuple(map(self._sent.__getitem__, sent))
        client_prints = tuple(map(self._prints.__getitem__, client))
        sent_prints = tuple(map(self._sent_prints.__getitem__, sent))
        return Prepared(
            client=messages,
            sent=entries,
            dropped=tuple(starmap(DroppedMessage, stored.dropped)),
            faults=stored.faults,
            forget_marks=stored.forget_marks,
            notes=stored.notes,
            states=self._states(stored.states),
            wanted=tuple(map(self._wanted, stored.wanted)),
            scope=stored.scope,
            pins=msgspec.json.decode(self._stored.values[stored.pins], type=_Pins),
            used=frozenset(stored.used),
            known_fingerprints=(
                Fingerprinted(messages, client_prints),
                Fingerprinted(entries, sent_prints),
            ),
        )

    def _summary(self, stored: StoredSummary) -> TurnSummary:
        known = None if stored.receipt == NONE else self._stored.receipts[stored.receipt]
        return TurnSummary(
            index=stored.index,
            turn=stored.turn,
            created=stored.created,
            planned=stored.planned,
            reason=stored.reason,
            edits=stored.edits,
            receipt=known,
        )

    def _wanted(self, stored: Wanted) -> Completion:
        messages = tuple(self._messages[place] for place in stored.messages)
        return Completion(stored.key, messages, stored.model, stored.max_tokens)

    def _states(self, place: int) -> Mapping[str, Mapping[str, Any]]:
        states: Mapping[str, Mapping[str, Any]] = msgspec.json.decode(self._stored.values[place])
        return states


class _Turn:
    """A turn and the lists that others are packed against."""

    def __init__(
        self,
        turn: RetainedTurn,
        lists: tuple[array[int], array[int], array[int], array[int], array[int]],
    ) -> None:
        self.turn = turn
        self.lists = lists
