"""A message list on its way through the policies, and what each of them made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from leyline_engine.contract import Mode
from leyline_policies.marks import MarkedMessage, mark_of, pair_by_origin

from .diff import diff_messages
from .messages import Message, MessageError, call_ids, check_message, check_messages
from .prepared import Change, DroppedMessage, Fault, PolicyFault, SentMessage

Sensitive = Callable[[Message], frozenset[str]]
"""What of a message is sensitive; an edit that takes any of it away is a forget."""


@dataclass(frozen=True)  # no slots: the list of messages is made once
class Stage:
    """The list between two policies."""

    sent: tuple[SentMessage, ...]
    dropped: tuple[DroppedMessage, ...] = ()
    faults: tuple[PolicyFault, ...] = ()

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
    places = _edited_places(given, after)
    if places is not None:
        entries = list(stage.sent)
        for index in places:
            if after[index] != given[index]:
                entries[index] = _changed(entries[index], after[index], change, sensitive)
        return replace(stage, sent=tuple(entries))
    sent: list[SentMessage] = []
    dropped = list(stage.dropped)
    for old_at, new_at in _aligned(given, after):
        entry = stage.sent[old_at] if old_at is not None else None
        message = after[new_at] if new_at is not None else None
        mark = mark_of(message) if message is not None else None
        if entry is None:
            if message is not None and not (mark and mark.dropped):
                sent.append(SentMessage(message, None, (_marked(change, message),)))
        elif message is None or (mark is not None and mark.dropped):
            if entry.client_index is not None:
                gone = _marked(change, message)
                if sensitive is not None and sensitive(entry.message):
                    gone = replace(gone, mode=Mode.FORGET)
                dropped.append(DroppedMessage(entry.client_index, gone))
        elif old_at is not None and (message is given[old_at] or message == given[old_at]):
            sent.append(entry)
        else:
            sent.append(_changed(entry, message, change, sensitive))
    return replace(stage, sent=tuple(sent), dropped=tuple(dropped))


def find_fault(before: Sequence[Message], after: object) -> Fault | None:
    """What makes ``after`` unfit to be sent in place of ``before``, if anything.

    Args:
        before: messages that are fit themselves.
    """
    if not isinstance(after, list) or not all(isinstance(message, dict) for message in after):
        return "bad_type"
    rewritten = _rewritten(before, after)
    try:
        if rewritten is not None:
            _check_rewritten([after[index] for index in rewritten])
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
    last_user = max((i for i, m in enumerate(before) if m.get("role") == "user"), default=None)
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


def _check_rewritten(messages: list[Message]) -> None:
    """Raises what says that one of them can't be sent."""
    msgspec.json.encode(messages)
    for index, message in enumerate(messages):
        check_message(index, message, {str(message.get("tool_call_id"))})


def _edited_places(given: Sequence[Message], after: Sequence[Message]) -> list[int] | None:
    """Where messages were edited, if nothing else was done; None where any came, went or moved."""
    if len(given) != len(after):
        return None
    pairs = enumerate(zip(given, after, strict=True))
    places = [index for index, (old, new) in pairs if new is not old]
    for index in places:
        new = after[index]
        if not isinstance(new, MarkedMessage) or new.origin is not given[index] or new.mark.dropped:
            return None
    return places


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


def _changed(
    entry: SentMessage, message: Message, change: Change, sensitive: Sensitive | None
) -> SentMessage:
    if not _differs(entry.message, message):
        # Only a volatile marker differs: no edit, but what the policy wants is sent.
        return msgspec.structs.replace(entry, message=message)
    own = _marked(change, message)
    if sensitive is not None and own.mode is not Mode.FORGET:
        found = sensitive(entry.message)
        if found and found - sensitive(message):
            own = replace(own, mode=Mode.FORGET)
    return SentMessage(message, entry.client_index, (*entry.changes, own))


def _differs(old: Message, new: Message) -> bool:
    # A text that differs says so at once; the long way is for markers and forms of content.
    if old.get("content") != new.get("content") and isinstance(new.get("content"), str):
        return not isinstance(old.get("content"), list) or _steps_differ(old, new)
    return _steps_differ(old, new)


def _steps_differ(old: Message, new: Message) -> bool:
    return any(step.kind != "kept" for step in diff_messages([old], [new]).steps)


def _marked(change: Change, message: Message | None) -> Change:
    """``change`` as far as the policy's mark says nothing else."""
    mark = mark_of(message) if message is not None else None
    if mark is None or (mark.cause is None and mark.mode is None):
        return change
    cause = change.cause if mark.cause is None else f"{change.cause}:{mark.cause}"
    mode = change.mode if mark.mode is None else Mode(mark.mode)
    return Change(cause, mode)


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
