"""Edits that cost no cached token: of messages that no earlier turn sent, or that an earlier turn
already sent edited.

A plan compares this prompt with cached ones, so it shows neither. But the caller must learn that
the prompt isn't the list it sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..model.prepared import Change, Prepared
from ..model.session import EditMode, EditRecord, RetainedTurn, Session

MAX_LISTED = 512
"""Largest number of listed edits per turn; the account counts the others."""


@dataclass(frozen=True, slots=True)
class StandingEdits:
    """Messages that are sent as an earlier turn's edit left them, by cause and mode."""

    cause: str
    mode: EditMode
    messages: int


@dataclass(frozen=True, slots=True)
class UncachedEdits:
    """Edits of a turn that its cached turns don't show."""

    listed: tuple[EditRecord, ...] = ()
    """New edits, without spans."""
    omitted: int = 0
    """Number of new edits beyond :data:`MAX_LISTED`."""
    standing: tuple[StandingEdits, ...] = ()


@dataclass(frozen=True, slots=True)
class _OwnEdit:
    """A client message that isn't sent unchanged, or one that a policy inserted."""

    place: int | None
    """Index in the client's list."""
    role: str
    change: Change
    value: int
    """Fingerprint of the client's message; of the sent one if a policy inserted it."""
    form: int | None
    """Fingerprint of the message sent in its place; None if there is none."""


def uncached_edits(
    prepared: Prepared, session: Session | None, shown: Sequence[EditRecord]
) -> UncachedEdits:
    """Find the edits that a plan doesn't show.

    Args:
        session: its state when the turn began.
        shown: the plan's own account.
    """
    if prepared.sent_as_given:
        return UncachedEdits()
    turns = session.turns if session is not None else ()
    departed = session.departed.messages if session is not None else {}
    history = _History([turn for turn in turns if not turn.for_policy], departed)
    places = {record.message for record in shown if record.message is not None}
    put_in = {(record.role, record.cause) for record in shown if record.message is None}
    new: list[EditRecord] = []
    standing: Counter[tuple[str, EditMode]] = Counter()
    for edit in _own_edits(prepared):
        if edit.place in places:
            continue
        if history.had(edit):
            standing[edit.change.cause, edit.change.mode.value] += 1
        elif edit.place is not None or (edit.role, edit.change.cause) not in put_in:
            new.append(_record(edit))
    kept = tuple(StandingEdits(*key, count) for key, count in standing.items())
    return UncachedEdits(tuple(new[:MAX_LISTED]), max(0, len(new) - MAX_LISTED), kept)


def was_sent(value: int, session: Session | None) -> bool:
    """Return True if an earlier turn of a session had a message of this fingerprint in its list."""
    if session is None:
        return False
    return value in session.departed.messages or any(
        value in turn.prepared.client_fingerprints for turn in session.turns
    )


def _own_edits(prepared: Prepared) -> Iterator[_OwnEdit]:
    client, prints = prepared.client, prepared.client_fingerprints
    for entry, form in zip(prepared.sent, prepared.sent_fingerprints, strict=True):
        change = entry.changes[-1] if entry.changes else None
        if change is None or change.callers_own:
            continue
        place, role = entry.client_index, str(entry.message.get("role", ""))
        yield _OwnEdit(place, role, change, form if place is None else prints[place], form)
    for item in prepared.dropped:
        place = item.client_index
        role = str(client[place].get("role", ""))
        yield _OwnEdit(place, role, item.change, prints[place], None)


class _History:
    """The forms in which earlier turns sent each message, newest turn first."""

    def __init__(
        self, turns: Sequence[RetainedTurn], departed: Mapping[int, Collection[str]]
    ) -> None:
        self._turns = turns[::-1]
        self._forms: dict[str, _Forms] = {}
        self._departed = departed

    def had(self, edit: _OwnEdit) -> bool:
        """Return True if the newest turn that had the message sent it in this form."""
        for turn in self._turns:
            forms = self._forms.get(turn.turn)
            if forms is None:
                forms = self._forms[turn.turn] = _Forms(turn.prepared)
            if edit.place is None:
                return edit.form in forms.put_in
            if edit.value in forms.known:
                return (edit.value, edit.form) in forms.edited
        # Past turns have only names; an edit remains in force unless its policy has changed.
        return edit.place is not None and edit.value in self._departed


class _Forms:
    """The forms in which one turn sent its messages."""

    def __init__(self, prepared: Prepared) -> None:
        own = list(_own_edits(prepared))
        self.known = frozenset(prepared.client_fingerprints)
        self.edited = {(edit.value, edit.form) for edit in own if edit.place is not None}
        self.put_in = {edit.form for edit in own if edit.place is None}


def _record(edit: _OwnEdit) -> EditRecord:
    return EditRecord(
        message=edit.place,
        role=edit.role,
        cause=edit.change.cause,
        mode=edit.change.mode.value,
        span=None,
        replacement_tokens=0,
        cached=False,
    )
