"""The message list between policies, and the explanation of each policy's edits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Literal

import msgspec

from leyline_engine.contract import Mode
from leyline_policies import Memo
from leyline_policies.changes import changed_places
from leyline_policies.conversation import nth_last
from leyline_policies.marks import MarkedMessage, mark_of

from ..model.messages import (
    Message,
    MessageError,
    call_ids,
    check_message,
    check_messages,
    fingerprint,
)
from ..model.prepared import Change, DroppedMessage, Fault, ForgetMark, PolicyFault, SentMessage
from .edited import RECALLED, PolicyEdits, Sensitive, aligned

_CLIENT, _FIT, _EDITED = "client", "fit", "edited"


@dataclass(frozen=True)  # no slots: the list of messages is made once
class Stage:
    """The list between two policies."""

    sent: tuple[SentMessage, ...]
    dropped: tuple[DroppedMessage, ...] = ()
    faults: tuple[PolicyFault, ...] = ()
    demands: Mapping[int, ForgetMark] = field(default_factory=dict)
    """Forget demands by index in the client's list: the last one for each, whatever became of the
    message afterwards."""
    refused: PolicyFault | None = None
    """The fault for which the request must not be sent."""

    @property
    def own_demands(self) -> dict[int, ForgetMark]:
        """The demands on the client's own messages."""
        return {place: mark for place, mark in self.demands.items() if place != RECALLED}

    @cached_property
    def messages(self) -> list[Message]:
        """The messages; don't change the list."""
        return [entry.message for entry in self.sent]

    def fault(self, found: PolicyFault, *, refuses: bool = False) -> Stage:
        """Return the same list with one more fault, which may refuse the request."""
        refused = self.refused or (found if refuses else None)
        return replace(self, faults=(*self.faults, found), refused=refused)


def client_stage(client: tuple[Message, ...], memo: Memo) -> Stage:
    """Return the client's list; entries that were in it on the last turn are the same objects."""
    stage = Stage(tuple(memo.map(client, _CLIENT, SentMessage, told=range(len(client)))))
    memo.settle(stage.messages)
    return stage


def explain(
    stage: Stage,
    given: Sequence[Message],
    after: Sequence[Message],
    change: Change,
    sensitive: Sensitive | None = None,
    *,
    memo: Memo | None = None,
) -> Stage:
    """Return the list after a policy, each message with its source.

    Args:
        given: the policy's input: the stage's messages or copies of them.
        after: the list that it returned, with its marks.
        change: the change of edits that it didn't mark.
        memo: remembers the explanation of each edited message, if a policy edits in place.
    """
    edits = PolicyEdits(given, change, sensitive)
    places = changed_places(given, after)
    in_place = len(given) == len(after) and all(
        isinstance(new := after[at], MarkedMessage) and new.origin is given[at] for at in places
    )
    if not in_place:
        return _realigned(stage, given, after, edits)
    memo, key = memo or Memo(), (_EDITED, change, sensitive is None)
    sent: list[SentMessage | None] = [*stage.sent]
    dropped, demands = [*stage.dropped], dict(stage.demands)
    entries, messages = [stage.sent[at] for at in places], [after[at] for at in places]
    for at, edited in zip(places, memo.pairs(entries, messages, key, edits.in_place), strict=True):
        sent[at] = edited.entry
        if edited.dropped or edited.demands:
            dropped += edited.dropped
            demands.update(edited.demands)
    kept = tuple(filter(None, sent))
    done = replace(stage, sent=kept, dropped=tuple(dropped), demands=demands)
    memo.settle(done.messages)
    return done


def _realigned(
    stage: Stage, given: Sequence[Message], after: Sequence[Message], edits: PolicyEdits
) -> Stage:
    """Return the list after a policy that inserted, removed, moved or rewrote messages."""
    sent: list[SentMessage] = []
    dropped = list(stage.dropped)
    for old_at, new_at in edits.steps(after):
        entry = stage.sent[old_at] if old_at is not None else None
        message = after[new_at] if new_at is not None else None
        mark = mark_of(message) if message is not None else None
        if entry is None:
            if message is None:
                continue
            place = edits.place_of(message)
            source = stage.sent[place] if place >= 0 else None
            if mark is None or not mark.dropped:
                sent.append(edits.put_in(message, source))
            elif source is not None:
                edits.demand(source, message)  # it was moved before it was dropped
        elif message is None or (mark is not None and mark.dropped):
            dropped += edits.dropped(entry, message)
        elif old_at is not None and (message is given[old_at] or message == given[old_at]):
            sent.append(entry)
        else:
            sent.append(edits.changed(entry, message))
    demands = {**stage.demands, **edits.demands}
    return replace(stage, sent=tuple(sent), dropped=tuple(dropped), demands=demands)


def declared_demands(
    sent: Iterable[SentMessage], dropped: Iterable[DroppedMessage]
) -> dict[int, ForgetMark]:
    """Return the forget demands of the client's own list."""
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


def find_fault(before: Sequence[Message], after: object, memo: Memo | None = None) -> Fault | None:
    """Return the fault that makes ``after`` unfit to be sent in place of ``before``, if any.

    Args:
        before: messages that are fit to be sent.
        memo: remembers which rewritten messages are fit.
    """
    if not isinstance(after, list) or not all(map(isinstance, after, repeat(dict))):
        return "bad_type"
    if len(before) == len(after):
        places = changed_places(before, after)
        old, new = ([items[at] for at in places] for items in (before, after))
        found = (memo or Memo()).pairs(old, new, _FIT, _rewritten)
        if "elsewhere" not in found:
            return "bad_message" if "unfit" in found else None
    try:
        known = set(map(id, before))
        msgspec.json.encode([message for message in after if id(message) not in known])
        check_messages(after)
    except (MessageError, TypeError, ValueError, RecursionError):  # the last: not JSON data
        return "bad_message"
    return _lost(before, after)


def _rewritten(old: Message, new: Message) -> Literal["fit", "unfit", "elsewhere"]:
    """Judge a message in the place of another.

    ``elsewhere``: it has another role, or makes or answers other calls; the list must be checked.
    """
    same_calls = new.get("tool_calls") is old.get("tool_calls") or call_ids(old) == call_ids(new)
    if not same_calls or any(old.get(name) != new.get(name) for name in ("role", "tool_call_id")):
        return "elsewhere"
    try:
        msgspec.json.encode(new)
        check_message(0, new)
    except (MessageError, TypeError, ValueError, RecursionError):
        return "unfit"
    return "fit"


def _lost(before: Sequence[Message], after: Sequence[Message]) -> Fault | None:
    """Return the fault of missing parts of ``before`` that must stay, if any."""
    if _unpaired(after) - _unpaired(before):
        return "broken_pair"
    last_user = nth_last(before, "user", 1)
    if last_user is not None and not any(message is before[last_user] for message in after):
        pairs = aligned(before, after)
        if any(old == last_user and new is None for old, new in pairs):
            return "lost_last_user"
    return None


def _unpaired(messages: Iterable[Message]) -> Counter[tuple[str, object]]:
    """Return the tool calls without a result, and the results without a call before them, by their
    ids. A client's own list may have some."""
    called: set[object] = set()
    answered: set[object] = set()
    found: Counter[tuple[str, object]] = Counter()
    for message in messages:
        if "tool_calls" in message:
            called.update(call_ids(message))
        elif message.get("role") == "tool":
            identifier = message.get("tool_call_id")
            answered.add(identifier)
            found["result", identifier] += identifier not in called
    found.update(("call", identifier) for identifier in called - answered)
    return found
