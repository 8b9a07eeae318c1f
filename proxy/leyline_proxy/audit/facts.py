"""The edits of a turn and their texts, taken from the plan. Pure.

The plan reports the edits. Added are the texts that an edit removed and inserted, for hashing, and
whether an engine may have received them before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from leyline_engine.contract import Mode

from ..model.messages import Message
from ..model.prepared import Prepared
from ..model.session import EditRecord, RetainedTurn, Session
from ..model.spans import SpanNames
from ..plan.synthesis import TurnPlan
from ..plan.uncached import was_sent

MAX_EDITS = 512
"""Largest number of a turn's edits; the record counts the others."""

MAX_TEXTS = 64
"""Largest number of messages that one edit removed or inserted."""


@dataclass(frozen=True, slots=True)
class EditFacts:
    """One edit and its texts."""

    record: EditRecord
    before: tuple[Message, ...] = ()
    """Messages as an earlier turn sent them; for a forget, also the caller's own."""
    after: tuple[Message, ...] = ()
    names: tuple[str, ...] = ()
    """Names of the message in the engine's ledger: the same in every turn."""
    sent_before: bool | None = True
    """True if an earlier turn had sent the text; None if this proxy can't know."""


@dataclass(frozen=True, slots=True)
class TurnEdits:
    """All edits of a turn."""

    edits: tuple[EditFacts, ...] = ()
    omitted: int = 0


def turn_edits(
    plan: TurnPlan,
    prepared: Prepared,
    names: SpanNames | None,
    session: Session | None,
    doubts: Collection[Mode] = (),
) -> TurnEdits:
    """Return the edits of a turn.

    Args:
        session: its state when the plan was made.
        doubts: modes of edits for which it is unknown whether an engine had the text before.
    """
    if not plan.edits:
        return TurnEdits()
    texts = _Texts(prepared, names, session, doubts)
    edits = tuple(texts.of(record) for record in plan.edits[:MAX_EDITS])
    return TurnEdits(edits, plan.omitted + len(plan.edits) - len(edits))


class _Texts:
    """Finds the earlier and later forms of messages."""

    def __init__(
        self,
        prepared: Prepared,
        names: SpanNames | None,
        session: Session | None,
        doubts: Collection[Mode],
    ) -> None:
        self._prepared = prepared
        self._names = names
        self._session = session
        self._turns = session.turns if session is not None else ()
        self._doubts = doubts
        self._sources: dict[str, Mapping[int, Message]] = {}

    def of(self, record: EditRecord) -> EditFacts:
        """Return the facts of one of the plan's edits."""
        if record.cause in ("template", "tools"):
            return EditFacts(record)
        if record.message is None:
            gone, new = self._unplaced(record.role, record.cause == "undeclared")
            return EditFacts(record, gone, new, sent_before=self._sent_before(record))
        names = self._names.client[record.message].all if self._names is not None else ()
        if not record.cached and not self._was_sent(record.message):
            own = self._prepared.client[record.message]
            after = self._sent.get(record.message)
            new = () if after is None else (after,)
            return EditFacts(record, (own,), new, names, self._sent_before(record))
        before = self._before(names)
        after = self._sent.get(record.message)
        own = self._prepared.client[record.message]
        if record.mode == "forget" and own not in (before, after):
            # The earlier turn sent it already edited, but this is the text that must not survive.
            befores: tuple[Message, ...] = (own,) if before is None else (before, own)
        else:
            befores = () if before is None else (before,)
        return EditFacts(record, befores, () if after is None else (after,), names)

    def _sent_before(self, record: EditRecord) -> bool | None:
        """Return whether an engine had the edit's text or insertion before; None if unknown."""
        if record.cached:
            return True
        return None if record.mode in self._doubts else False

    def _was_sent(self, place: int) -> bool:
        return was_sent(self._prepared.client_fingerprints[place], self._session)

    @cached_property
    def _sent(self) -> Mapping[int, Message]:
        return _by_client_index(self._prepared)

    def _before(self, names: Sequence[str]) -> Message | None:
        """Return the message's form in the newest turn that had it."""
        for turn in reversed(self._turns):
            for name in names:
                place = turn.names.index.get(name)
                if place is not None:
                    return self._source(turn).get(place)
        return None

    def _source(self, turn: RetainedTurn) -> Mapping[int, Message]:
        if turn.turn not in self._sources:
            self._sources[turn.turn] = _by_client_index(turn.prepared)
        return self._sources[turn.turn]

    def _unplaced(
        self, role: str, callers: bool
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Return messages of a role that the last turn had and this one lacks, and the reverse.

        Args:
            callers: True if the caller removed them; otherwise a policy had inserted them, or does
                now.
        """
        last = self._session.last if self._session is not None else None
        if last is None:
            return (), () if callers else _of_role(_put_in(self._prepared), role)
        if callers:
            held = set() if self._names is None else {n for c in self._names.client for n in c.all}
            sent = self._source(last)
            names = enumerate(last.names.client)
            gone = [sent[k] for k, name in names if name.id not in held and k in sent]
            return _of_role(gone, role), ()
        own, others = _put_in(self._prepared), _put_in(last.prepared)
        gone = [message for message in others if message not in own]
        new = [message for message in own if message not in others]
        return _of_role(gone, role), _of_role(new, role)


def _of_role(messages: Sequence[Message], role: str) -> tuple[Message, ...]:
    return tuple(message for message in messages if message.get("role") == role)[:MAX_TEXTS]


def _put_in(prepared: Prepared) -> list[Message]:
    return [entry.message for entry in prepared.sent if entry.client_index is None]


def _by_client_index(prepared: Prepared) -> dict[int, Message]:
    return {
        entry.client_index: entry.message
        for entry in prepared.sent
        if entry.client_index is not None
    }
