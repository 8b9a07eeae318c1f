"""A message list on its way through the policies, and what each of them made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from leyline_engine.contract import Mode
from leyline_policies import Memo
from leyline_policies.conversation import nth_last
from leyline_policies.marks import Mark, MarkedMessage, mark_of, marks_since, pair_by_origin

from .diff import diff_messages
from .messages import Message, MessageError, call_ids, check_message, check_messages, fingerprint
from .prepared import Change, DroppedMessage, Fault, ForgetMark, PolicyFault, SentMessage

_FIT = "fit"

Sensitive = Callable[[Message], frozenset[str]]
"""What of a message is sensitive; an edit that takes any of it away is a forget."""


@dataclass(frozen=True)  # no slots: the list of messages is made once
class Stage:
    """The list between two policies."""

    sent: tuple[SentMessage, ...]
    dropped: tuple[DroppedMessage, ...] = ()
    faults: tuple[PolicyFault, ...] = ()
    demands: Mapping[int, ForgetMark] = field(default_factory=dict)
    """What is to be forgotten, by index in the client's list: the last edit that said so, whatever
    became of the message behind it."""

    @cached_property
    def messages(self) -> list[Message]:
        """The messages; not to be changed."""
        return [entry.message for entry in self.sent]

    def fault(self, name: str, fault: Fault) -> Stage:
        """The same list, and one more fault."""
        return replace(self, faults=(*self.faults, PolicyFault(name, fault)))


def advance(
    stage: Stage,
    given: Sequence[Message],
    after: Sequence[Message],
    change: Change,
    sensitive: Sensitive | None = None,
) -> Stage:
    """The list after a policy, each message with where it comes from.

    Args:
        given: what the policy was given: the stage's messages or copies of them.
        after: what it returned, with its marks.
        change: what holds for edits that it didn't mark.
    """
    in_place = _edited_in_place(given, after)
    edited = _Edited(given, change, sensitive)
    if in_place is not None:
        entries = list(stage.sent)
        for index, made in in_place.items():
            if made != given[index]:
                # Made from the given one in a single edit: its own mark says all.
                entries[index] = edited.changed(entries[index], made, edited.said(made.mark))
        return replace(stage, sent=tuple(entries), demands={**stage.demands, **edited.demands})
    sent: list[SentMessage] = []
    dropped = list(stage.dropped)
    for old_at, new_at in edited.steps(after):
        entry = stage.sent[old_at] if old_at is not None else None
        message = after[new_at] if new_at is not None else None
        mark = mark_of(message) if message is not None else None
        if entry is None:
            if message is None:
                continue
            place = edited.place_of(message)
            source = stage.sent[place] if place >= 0 else None
            if mark is None or not mark.dropped:
                sent.append(edited.put_in(message, source))
            elif source is not None:
                edited.demand(source, message)  # it was moved before it was dropped
        elif message is None or (mark is not None and mark.dropped):
            dropped += edited.dropped(entry, message)
        elif old_at is not None and (message is given[old_at] or message == given[old_at]):
            sent.append(entry)
        else:
            sent.append(edited.changed(entry, message))
    demands = {**stage.demands, **edited.demands}
    return replace(stage, sent=tuple(sent), dropped=tuple(dropped), demands=demands)


class _Edited:
    """One policy's edits as they are made, and what they demand to be forgotten.

    Args:
        given: what the policy was given.
        change: what holds for edits that it didn't mark.
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
        """What a single mark says of an edit."""
        key = (mark.mode, mark.cause)
        known = self._said.get(key)
        if known is None:
            known = self._said[key] = _marked(self._change, (mark,))
        return known

    @cached_property
    def _places(self) -> dict[int, int]:
        return {id(message): place for place, message in enumerate(self._given)}

    def changed(
        self, entry: SentMessage, message: Message, own: Change | None = None
    ) -> SentMessage:
        """An edited message in its place.

        Args:
            own: what is said of the edit, where that is known.
        """
        if not _differs(entry.message, message):
            # Only a volatile marker differs: no edit, but what the policy wants is sent.
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
        """A message that wasn't there; ``source`` is the one that it was made from elsewhere."""
        own = self._marked(message)
        done = SentMessage(message, None, (own,), _client_place(source) if source else None)
        self._demand(done, own, fingerprint(message) if own.mode is Mode.FORGET else 0)
        return done

    def dropped(self, entry: SentMessage, message: Message | None) -> Iterator[DroppedMessage]:
        """A message that is gone."""
        own = self.demand(entry, message)
        if entry.client_index is not None:
            yield DroppedMessage(entry.client_index, own)

    def demand(self, entry: SentMessage, message: Message | None) -> Change:
        """What is said of a message that is gone, noted where it is to be forgotten."""
        own = self._marked(message)
        if self._sensitive is not None and self._sensitive(entry.message):
            own = replace(own, mode=Mode.FORGET)
        self._demand(entry, own, 0)
        return own

    def steps(self, after: Sequence[Message]) -> Iterator[tuple[int | None, int | None]]:
        """As :func:`_aligned`, where no message stands for another than it was made from."""
        for old_at, new_at in _aligned(self._given, after):
            if old_at is not None and new_at is not None:
                place = self.place_of(after[new_at])
                if place not in (old_at, -1) and self._given[place] is not self._given[old_at]:
                    yield old_at, None
                    yield None, new_at
                    continue
            yield old_at, new_at

    def place_of(self, message: Message) -> int:
        """Where the given message is that ``message`` was made from; -1 where it isn't known."""
        while isinstance(message, MarkedMessage) and id(message) not in self._places:
            message = message.origin
        return self._places.get(id(message), -1)

    def _demand(self, entry: SentMessage, change: Change, result: int) -> None:
        place = _client_place(entry)
        if change.mode is Mode.FORGET and place is not None:
            self.demands[place] = ForgetMark(change.cause, result)

    def _marked(self, message: Message | None) -> Change:
        marks = [] if message is None else list(marks_since(message, self._places))
        return _marked(self._change, marks)


def declared_demands(
    sent: Iterable[SentMessage], dropped: Iterable[DroppedMessage]
) -> dict[int, ForgetMark]:
    """What the client's own list demands to be forgotten."""
    found = {
        entry.client_index: ForgetMark(change.cause, fingerprint(entry.message))
        for entry in sent
        for change in entry.changes
        if entry.client_index is not None and change.mode is Mode.FORGET
    }
    for item in dropped:
        if item.change.mode is Mode.FORGET:
            found[item.client_index] = ForgetMark(item.change.cause, 0)
    return found


def _client_place(entry: SentMessage) -> int | None:
    return entry.moved_from if entry.client_index is None else entry.client_index


def find_fault(before: Sequence[Message], after: object, memo: Memo | None = None) -> Fault | None:
    """What makes ``after`` unfit to be sent in place of ``before``, if anything.

    Args:
        before: messages that are fit themselves.
        memo: remembers which messages were found fit, where they won't be changed any more.
    """
    if not isinstance(after, list) or not all(isinstance(message, dict) for message in after):
        return "bad_type"
    rewritten = _rewritten(before, after)
    try:
        if rewritten is not None:
            (memo or Memo()).map([after[index] for index in rewritten], _FIT, _check_rewritten)
        else:
            known = set(map(id, before))
            msgspec.json.encode([message for message in after if id(message) not in known])
            check_messages(after)
    except MessageError as error:
        return "broken_pair" if error.param.endswith(".tool_call_id") else "bad_message"
    except (TypeError, ValueError, RecursionError):  # nothing that JSON could carry
        return "bad_message"
    return _lost(before, after) if rewritten is None else None


def _lost(before: Sequence[Message], after: Sequence[Message]) -> Fault | None:
    """What of ``before`` must not be missing and is."""
    if _unanswered(after) - _unanswered(before):
        return "broken_pair"
    last_user = nth_last(before, "user", 1)
    if last_user is not None and not any(message is before[last_user] for message in after):
        pairs = _aligned(before, after)
        if any(old == last_user and new is None for old, new in pairs):
            return "lost_last_user"
    return None


def _rewritten(before: Sequence[Message], after: Sequence[Message]) -> list[int] | None:
    """Which messages were rewritten, where that is all that happened: each is in its place, in the
    same role, and makes or answers the same calls."""
    if len(before) != len(after):
        return None
    found: list[int] = []
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if old is new:
            continue
        if old.get("role") != new.get("role") or old.get("tool_call_id") != new.get("tool_call_id"):
            return None
        calls = new.get("tool_calls")
        if calls is not old.get("tool_calls") and call_ids(old) != call_ids(new):
            return None
        found.append(index)
    return found


def _check_rewritten(message: Message) -> bool:
    """Whether a message can be sent that answers what it answered before. Raises what says why
    not."""
    msgspec.json.encode(message)
    check_message(0, message, {str(message.get("tool_call_id"))})
    return True


def _edited_in_place(
    given: Sequence[Message], after: Sequence[Message]
) -> dict[int, MarkedMessage] | None:
    """The messages that were edited, by place, if nothing else was done; None where any came, went
    or moved."""
    if len(given) != len(after):
        return None
    pairs = enumerate(zip(given, after, strict=True))
    edited: dict[int, MarkedMessage] = {}
    for index in [index for index, (old, new) in pairs if new is not old]:
        new = after[index]
        if not isinstance(new, MarkedMessage) or new.origin is not given[index] or new.mark.dropped:
            return None
        edited[index] = new
    return edited


def _aligned(
    given: Sequence[Message], after: Sequence[Message]
) -> Iterator[tuple[int | None, int | None]]:
    """Places of what belongs together in both lists, in order; None where one has nothing.

    What a policy made from a message it was given says so itself; between such pairs the
    messages are compared.
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
    # A text that differs says so at once; the long way is for markers and forms of content.
    if old.get("content") != new.get("content") and isinstance(new.get("content"), str):
        return not isinstance(old.get("content"), list) or _steps_differ(old, new)
    return _steps_differ(old, new)


def _steps_differ(old: Message, new: Message) -> bool:
    return any(step.kind != "kept" for step in diff_messages([old], [new]).steps)


def _marked(change: Change, marks: Sequence[Mark]) -> Change:
    """``change`` as far as the policy's marks say nothing else: the strictest of them, where it
    edited what it had edited."""
    if all(mark.cause is None and mark.mode is None for mark in marks):
        return change
    modes = [change.mode if mark.mode is None else Mode(mark.mode) for mark in marks]
    mode = Mode.FORGET if Mode.FORGET in modes else Mode.AMORTIZE
    told = [mark.cause for mark, each in zip(marks, modes, strict=True) if each is mode]
    causes = [cause for cause in (*told, *(mark.cause for mark in marks)) if cause is not None]
    return Change(f"{change.cause}:{causes[0]}" if causes else change.cause, mode)


def _unanswered(messages: Iterable[Message]) -> set[str]:
    """Ids of tool calls without a result."""
    called: set[str] = set()
    answered: set[object] = set()
    for message in messages:
        if "tool_calls" in message:
            called.update(call_ids(message))
        elif message.get("role") == "tool":
            answered.add(message.get("tool_call_id"))
    return called - answered
