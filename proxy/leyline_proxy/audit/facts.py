"""What a turn did to its conversation, taken from the plan: which edits, of which texts. Pure.

The plan tells what changed in the cache. Two things are added: the texts that an edit took away and
put in, so that they can be hashed, and edits of messages that no engine has seen unedited, which
the plan has no reason to tell of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from leyline_engine.contract import Mode

from ..core.messages import Message
from ..core.prepared import Change, Prepared
from ..core.session import EditRecord, RetainedTurn, Session
from ..core.spans import SpanNames

MAX_EDITS = 512
"""Of one turn; the record says how many more there were."""

MAX_TEXTS = 64
"""Messages that one edit took away or put in."""


@dataclass(frozen=True, slots=True)
class EditFacts:
    """One edit and its texts."""

    record: EditRecord
    before: tuple[Message, ...] = ()
    """As an earlier turn sent them; of a forget, the caller's own, too."""
    after: tuple[Message, ...] = ()
    names: tuple[str, ...] = ()
    """Of the message in the engine's ledger: the same in every turn."""
    sent_before: bool | None = True
    """Whether an earlier turn had sent the text; None where this proxy can't know."""


@dataclass(frozen=True, slots=True)
class TurnEdits:
    """All edits of a turn."""

    edits: tuple[EditFacts, ...] = ()
    omitted: int = 0


def turn_edits(
    told: Sequence[EditRecord],
    prepared: Prepared,
    names: SpanNames | None,
    session: Session | None,
    doubts: Collection[Mode] = (),
) -> TurnEdits:
    """The edits of a turn.

    Args:
        told: the plan's account.
        session: as it was when the plan was made.
        doubts: modes of edits of which nobody can tell whether an engine had the text before.
    """
    if not told and not prepared.dropped and not any(entry.changes for entry in prepared.sent):
        return TurnEdits()
    texts = _Texts(prepared, names, session.turns if session is not None else ())
    edits = [texts.of(record) for record in told[:MAX_EDITS]]
    known = {record.message for record in told}
    first = list(_first_sent(prepared, session, known))
    for index, change in first[: MAX_EDITS - len(edits)]:
        sent_before = None if change.mode in doubts else False
        edits.append(texts.first_sent(index, change, sent_before))
    return TurnEdits(tuple(edits), len(told) + len(first) - len(edits))


def _first_sent(
    prepared: Prepared, session: Session | None, known: Collection[int | None]
) -> Iterator[tuple[int, Change]]:
    """Edits of messages that no turn of the session has had."""
    changed = [
        (entry.client_index, change)
        for entry in prepared.sent
        for change in entry.changes[-1:]
        if entry.client_index is not None and not change.callers_own
    ]
    changed += [(item.client_index, item.change) for item in prepared.dropped]
    if not changed:
        return
    turns = session.turns if session is not None else ()
    departed = session.departed.messages if session is not None else {}
    newest = set(turns[-1].prepared.client_fingerprints) if turns else set()
    for index, change in changed:
        value = prepared.client_fingerprints[index]
        if value in newest or value in departed or index in known:
            continue
        if not any(value in turn.prepared.client_fingerprints for turn in turns[:-1]):
            yield index, change


class _Texts:
    """Finds what messages were and what they became."""

    def __init__(
        self, prepared: Prepared, names: SpanNames | None, turns: Sequence[RetainedTurn]
    ) -> None:
        self._prepared = prepared
        self._names = names
        self._turns = turns
        self._sources: dict[str, Mapping[int, Message]] = {}

    def of(self, record: EditRecord) -> EditFacts:
        """An edit that the plan tells of."""
        if record.cause in ("template", "tools"):
            return EditFacts(record)
        if record.message is None:
            gone, new = self._unplaced(record.role, record.cause == "undeclared")
            return EditFacts(record, gone, new)
        names = self._names.client[record.message].all if self._names is not None else ()
        before = self._before(names)
        after = self._sent.get(record.message)
        own = self._prepared.client[record.message]
        if record.mode == "forget" and own not in (before, after):
            # What an earlier turn sent was edited before, but this is what must not survive.
            befores: tuple[Message, ...] = (own,) if before is None else (before, own)
        else:
            befores = () if before is None else (before,)
        return EditFacts(
            record,
            befores,
            () if after is None else (after,),
            names,
        )

    def first_sent(self, index: int, change: Change, sent_before: bool | None) -> EditFacts:
        """An edit of a message that is sent for the first time."""
        message = self._prepared.client[index]
        record = EditRecord(
            message=index,
            role=str(message.get("role", "")),
            cause=change.cause,
            mode=change.mode.value,
            span=None,
            replacement_tokens=0,
        )
        after = self._sent.get(index)
        names = self._names.client[index].all if self._names is not None else ()
        return EditFacts(record, (message,), () if after is None else (after,), names, sent_before)

    @cached_property
    def _sent(self) -> Mapping[int, Message]:
        return _by_client_index(self._prepared)

    def _before(self, names: Sequence[str]) -> Message | None:
        """What the newest turn that had the message sent for it."""
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
        """Messages of a role that the last turn had and this one lacks, and the other way round.

        Args:
            callers: the caller took them out; else a policy had put them in, or does now.
        """
        if not self._turns:
            return (), ()
        last = self._turns[-1]
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
