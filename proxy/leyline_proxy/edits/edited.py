"""A policy's edits: their changes, and the source message of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from leyline_engine.contract import Mode
from leyline_policies.marks import Mark, MarkedMessage, marks_since, pair_by_origin

from ..model.diff import diff_messages
from ..model.messages import Message, fingerprint
from ..model.prepared import Change, DroppedMessage, ForgetMark, SentMessage
from ..model.vocabulary import RECALL

RECALLED = -1
"""Place of a demand on a text that was put back and isn't in a message of the client's."""

Sensitive = Callable[[Message], frozenset[str]]
"""Returns a message's sensitive content; an edit that removes any of it is a forget."""


@dataclass(frozen=True, slots=True)
class EditedInPlace:
    """One message after a policy that kept the places of the others."""

    entry: SentMessage | None
    """None if it was dropped."""
    dropped: tuple[DroppedMessage, ...] = ()
    demands: Mapping[int, ForgetMark] = field(default_factory=dict)


class PolicyEdits:
    """One policy's edits, collected one by one, and their forget demands.

    Args:
        given: the messages that the policy got.
        change: the change of edits that it didn't mark.
    """

    def __init__(
        self, given: Sequence[Message], change: Change, sensitive: Sensitive | None
    ) -> None:
        self._given = given
        self._change = change
        self._sensitive = sensitive
        self._said: dict[tuple[str | None, str | None], Change] = {}
        self.demands: dict[int, ForgetMark] = {}

    def said(self, mark: Mark) -> Change:
        """Return the change of an edit with a single mark."""
        key = (mark.mode, mark.cause)
        known = self._said.get(key)
        if known is None:
            known = self._said[key] = _marked(self._change, (mark,))
        return known

    def in_place(self, entry: SentMessage, new: Message) -> EditedInPlace:
        """Return one message that was edited or dropped once; :attr:`demands` become its own."""
        assert isinstance(new, MarkedMessage)  # noqa: S101 - explain() has looked
        if not new.mark.dropped and new == new.origin:
            return EditedInPlace(entry)
        self.demands = {}
        if new.mark.dropped:
            return EditedInPlace(None, tuple(self.dropped(entry, new)), self.demands)
        return EditedInPlace(self.changed(entry, new, self.said(new.mark)), (), self.demands)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {id(message): place for place, message in enumerate(self._given)}

    def changed(
        self, entry: SentMessage, message: Message, own: Change | None = None
    ) -> SentMessage:
        """Return an edited message in its place.

        Args:
            own: the edit's change, if known.
        """
        if not _differs(entry.message, message):
            # Only a volatile marker differs: no edit, but the policy's message is sent.
            return msgspec.structs.replace(entry, message=message)
        own = self._marked(message) if own is None else own
        if self._sensitive is not None and own.mode is not Mode.FORGET:
            found = self._sensitive(entry.message)
            if found and found - self._sensitive(message):
                own = replace(own, mode=Mode.FORGET)
        changes = (*entry.changes, own)
        done = SentMessage(message, entry.client_index, changes, entry.moved_from)
        if own.mode is Mode.FORGET:
            self._demand(done, own, fingerprint(message))
        return done

    def put_in(self, message: Message, source: SentMessage | None) -> SentMessage:
        """Return an inserted message; ``source`` is its source at another place, if any."""
        own = self._marked(message)
        done = SentMessage(message, None, (own,), _client_place(source) if source else None)
        self._demand(done, own, fingerprint(message) if own.mode is Mode.FORGET else 0)
        return done

    def dropped(self, entry: SentMessage, message: Message | None) -> Iterator[DroppedMessage]:
        """Yield the record of a dropped message, if the client sent it."""
        own = self.demand(entry, message)
        if entry.client_index is not None:
            yield DroppedMessage(entry.client_index, own)

    def demand(self, entry: SentMessage, message: Message | None) -> Change:
        """Return the change of a dropped message, and note it if it must be forgotten."""
        own = self._marked(message)
        if self._sensitive is not None and self._sensitive(entry.message):
            own = replace(own, mode=Mode.FORGET)
        self._demand(entry, own, 0)
        return own

    def steps(self, after: Sequence[Message]) -> Iterator[tuple[int | None, int | None]]:
        """Yield :func:`aligned` places, but pair no message with another than its source."""
        for old_at, new_at in aligned(self._given, after):
            if old_at is not None and new_at is not None:
                place = self.place_of(after[new_at])
                if place not in (old_at, -1) and self._given[place] is not self._given[old_at]:
                    yield old_at, None
                    yield None, new_at
                    continue
            yield old_at, new_at

    def place_of(self, message: Message) -> int:
        """Return the place of the given message that ``message`` came from; -1 if unknown."""
        while isinstance(message, MarkedMessage) and id(message) not in self._places:
            message = message.origin
        return self._places.get(id(message), -1)

    def _demand(self, entry: SentMessage, change: Change, result: int) -> None:
        place = _client_place(entry)
        if place is None and any(each.cause == RECALL for each in entry.changes):
            place = RECALLED
        if change.mode is Mode.FORGET and place is not None:
            self.demands[place] = ForgetMark(change.cause, result)

    def _marked(self, message: Message | None) -> Change:
        marks = [] if message is None else list(marks_since(message, self._places))
        return _marked(self._change, marks)


def _client_place(entry: SentMessage) -> int | None:
    return entry.moved_from if entry.client_index is None else entry.client_index


def aligned(
    given: Sequence[Message], after: Sequence[Message]
) -> Iterator[tuple[int | None, int | None]]:
    """Yield the places of matching messages in both lists, in order; None if one list has none.

    Messages that a policy made from given ones name their origins. Between such pairs, messages
    are compared.
    """
    old_at = new_at = 0
    for old, new in [*pair_by_origin(given, after), (len(given), len(after))]:
        if old_at < old or new_at < new:
            for step in diff_messages(given[old_at:old], after[new_at:new]).steps:
                yield (
                    None if step.old is None else old_at + step.old,
                    None if step.new is None else new_at + step.new,
                )
        if old < len(given):
            yield old, new
        old_at, new_at = old + 1, new + 1


def _differs(old: Message, new: Message) -> bool:
    # Different texts are found at once; the long way is for markers and forms of content.
    if old.get("content") != new.get("content") and isinstance(new.get("content"), str):
        return not isinstance(old.get("content"), list) or _steps_differ(old, new)
    return _steps_differ(old, new)


def _steps_differ(old: Message, new: Message) -> bool:
    return any(step.kind != "kept" for step in diff_messages([old], [new]).steps)


def _marked(change: Change, marks: Sequence[Mark]) -> Change:
    """Return ``change`` with the policy's marks applied: the strictest, if it edited its own
    edits."""
    if all(mark.cause is None and mark.mode is None for mark in marks):
        return change
    modes = [change.mode if mark.mode is None else Mode(mark.mode) for mark in marks]
    mode = Mode.FORGET if Mode.FORGET in modes else Mode.AMORTIZE
    told = [mark.cause for mark, each in zip(marks, modes, strict=True) if each is mode]
    causes = [cause for cause in (*told, *(mark.cause for mark in marks)) if cause is not None]
    return Change(f"{change.cause}:{causes[0]}" if causes else change.cause, mode)
