"""A message list on its way through the policies, and what each of them made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat

import msgspec

from leyline_engine.contract import Mode
from leyline_policies import Memo
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
from .edited import PolicyEdits, Sensitive, aligned

_CLIENT, _FIT, _TRAIL = "client", "fit", "trail"


@dataclass(frozen=True)  # no slots: the list of messages is made once
class Stage:
    """The list between two policies."""

    sent: tuple[SentMessage, ...]
    dropped: tuple[DroppedMessage, ...] = ()
    faults: tuple[PolicyFault, ...] = ()
    demands: Mapping[int, ForgetMark] = field(default_factory=dict)
    """What is to be forgotten, by index in the client's list: the last edit that said so, whatever
    became of the message behind it."""
    refused: PolicyFault | None = None
    """The fault for which the request must not be sent."""

    @cached_property
    def messages(self) -> list[Message]:
        """The messages; not to be changed."""
        return [entry.message for entry in self.sent]

    def fault(self, name: str, fault: Fault, *, refuses: bool = False) -> Stage:
        """The same list, and one more fault; with it the request may be refused."""
        found = PolicyFault(name, fault)
        refused = self.refused or (found if refuses else None)
        return replace(self, faults=(*self.faults, found), refused=refused)


def client_stage(client: tuple[Message, ...], memo: Memo) -> Stage:
    """The client's list; of what was in its place on the last turn the entries are the same."""
    entries = memo.map(client, _CLIENT, SentMessage, told=range(len(client)))
    stage = Stage(tuple(entries))
    memo.changes.settle(stage.messages)
    if _CLIENT in memo.kept:
        before, last = memo.kept[_CLIENT]
        places = memo.changes.between(before, client)
        memo.changes.note(last.sent, stage.sent, places)
        memo.changes.note(last.messages, stage.messages, places)
    memo.kept[_CLIENT] = client, stage
    return stage


def advance(
    stage: Stage,
    given: Sequence[Message],
    after: Sequence[Message],
    change: Change,
    sensitive: Sensitive | None = None,
    *,
    memo: Memo | None = None,
    place: str = "",
) -> Stage:
    """The list after a policy, each message with where it comes from.

    Args:
        given: what the policy was given: the stage's messages or copies of them.
        after: what it returned, with its marks.
        change: what holds for edits that it didn't mark.
        memo: remembers what was made of each message, where a policy edits in place.
        place: the policy's in the pipeline.
    """
    if memo is None or not memo.changes.is_settled(after):
        after = tuple(after)
    edits = PolicyEdits(given, change, sensitive)
    key = (_TRAIL, place, change, sensitive is None)
    last = None if memo is None or given is not stage.messages else memo.kept.get(key)
    places: Iterable[int] = range(len(after))
    if memo is not None and last is not None:
        places = _since(memo, last, stage.sent, after)
    if not _in_place(given, after, places):
        return _realigned(stage, given, after, edits)
    account = _Account.since(last, len(after))
    entries = [] if last is None else [*last.entries[: len(after)]]
    for at in places:
        entry = account.enter(at, stage.sent[at], given[at], after[at], edits)
        entries[at : at + 1] = [entry]
    done = account.closed(stage, entries, after)
    if memo is not None and given is stage.messages:
        memo.changes.settle(done.messages)
        if last is not None and not account.dropped and not last.account.dropped:
            # One by one, so whoever compares the lists need not look.
            both = [at for at in places if at < len(last.after)]
            memo.changes.note(last.done.sent, done.sent, both)
            memo.changes.note(last.done.messages, done.messages, both)
        kept = tuple(entries) if account.dropped else done.sent
        memo.kept[key] = _Trail(stage.sent, after, kept, account, done)
    return done


@dataclass(frozen=True, slots=True)
class _Account:
    """What became of the messages of a list, where a policy edited in place."""

    unlike: set[int] = field(default_factory=set)
    """Where another message stands than what the policy returned, which was no edit."""
    dropped: dict[int, tuple[DroppedMessage, ...]] = field(default_factory=dict)
    """By place."""
    demands: dict[int, Mapping[int, ForgetMark]] = field(default_factory=dict)
    """By place."""

    @classmethod
    def since(cls, last: _Trail | None, size: int) -> _Account:
        """An account for ``size`` messages that goes on from the last turn's."""
        if last is None:
            return cls()
        before = last.account
        return cls(
            {at for at in before.unlike if at < size},
            {at: each for at, each in before.dropped.items() if at < size},
            {at: each for at, each in before.demands.items() if at < size},
        )

    def enter(
        self, at: int, entry: SentMessage, old: Message, new: Message, edits: PolicyEdits
    ) -> SentMessage:
        """What the policy made of one message: nothing, or it edited or dropped it once."""
        self.dropped.pop(at, None)
        self.demands.pop(at, None)
        edits.demands.clear()
        if isinstance(new, MarkedMessage) and new is not old:
            if new.mark.dropped:
                self.dropped[at] = tuple(edits.dropped(entry, new))
            elif new != old:
                entry = edits.changed(entry, new, edits.said(new.mark))
        if edits.demands:
            self.demands[at] = dict(edits.demands)
        if entry.message is new:
            self.unlike.discard(at)
        else:
            self.unlike.add(at)
        return entry

    def closed(
        self, stage: Stage, entries: Sequence[SentMessage], after: Sequence[Message]
    ) -> Stage:
        """The list that comes of it."""
        sent = entries
        if self.dropped:
            sent = [entry for at, entry in enumerate(entries) if at not in self.dropped]
        dropped = chain.from_iterable(self.dropped[at] for at in sorted(self.dropped))
        demands = dict(stage.demands)
        for at in sorted(self.demands):
            demands.update(self.demands[at])
        done = replace(stage, sent=tuple(sent), dropped=(*stage.dropped, *dropped), demands=demands)
        if not self.dropped and not self.unlike:
            # They need not be gathered once more.
            vars(done)["messages"] = after if isinstance(after, list) else list(after)
        return done


@dataclass(frozen=True, slots=True)
class _Trail:
    """What a policy was given and made of it on the last turn."""

    sent: tuple[SentMessage, ...]
    after: Sequence[Message]
    entries: tuple[SentMessage, ...]
    """For each message, those that were dropped included."""
    account: _Account
    done: Stage


def _since(
    memo: Memo, last: _Trail, sent: Sequence[SentMessage], after: Sequence[Message]
) -> list[int]:
    """Where something else was given or made than on the last turn."""
    places = {*memo.changes.between(last.sent, sent), *memo.changes.between(last.after, after)}
    new = range(min(len(last.sent), len(last.after)), len(after))
    return sorted({*(at for at in places if at < len(after)), *new})


def _in_place(given: Sequence[Message], after: Sequence[Message], places: Iterable[int]) -> bool:
    """Whether nothing but single edits and drops were done at ``places``, each said in its mark."""
    if len(given) != len(after):
        return False
    for at in places:
        new = after[at]
        if new is given[at]:
            continue
        if not isinstance(new, MarkedMessage) or new.origin is not given[at]:
            return False
    return True


def _realigned(
    stage: Stage, given: Sequence[Message], after: Sequence[Message], edits: PolicyEdits
) -> Stage:
    """The list after a policy that put in, took out or moved messages, or wrote its own."""
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


def find_fault(before: Sequence[Message], after: object, memo: Memo | None = None) -> Fault | None:
    """What makes ``after`` unfit to be sent in place of ``before``, if anything.

    Args:
        before: messages that are fit themselves.
        memo: remembers what was found fit, where the two lists won't be changed any more.
    """
    if not isinstance(after, list) or not all(map(isinstance, after, repeat(dict))):
        return "bad_type"
    places = _not_yet_fit(before, after, memo) if len(before) == len(after) else ()
    in_place = len(before) == len(after) and all(_same_part(before[i], after[i]) for i in places)
    try:
        if in_place:
            for message in (after[i] for i in places if after[i] is not before[i]):
                _check_rewritten(message)
        else:
            known = set(map(id, before))
            msgspec.json.encode([message for message in after if id(message) not in known])
            check_messages(after)
    except MessageError as error:
        return "broken_pair" if error.param.endswith(".tool_call_id") else "bad_message"
    except (TypeError, ValueError, RecursionError):  # nothing that JSON could carry
        return "bad_message"
    if in_place and memo is not None:
        memo.kept[_FIT] = before, after
    return None if in_place else _lost(before, after)


def _not_yet_fit(
    before: Sequence[Message], after: Sequence[Message], memo: Memo | None
) -> Sequence[int]:
    """Where not the same was sent in place of the same when a list was last found fit.

    That was a list in which each message was rewritten in its place, so each was judged by itself.
    """
    last = memo.kept.get(_FIT) if memo is not None else None
    if memo is None or last is None:
        return range(len(after))
    memo.changes.settle(before)
    memo.changes.settle(after)
    places = {*memo.changes.between(last[0], before), *memo.changes.between(last[1], after)}
    return [*places, *range(len(last[1]), len(after))]


def _lost(before: Sequence[Message], after: Sequence[Message]) -> Fault | None:
    """What of ``before`` must not be missing and is."""
    if _unanswered(after) - _unanswered(before):
        return "broken_pair"
    last_user = nth_last(before, "user", 1)
    if last_user is not None and not any(message is before[last_user] for message in after):
        pairs = aligned(before, after)
        if any(old == last_user and new is None for old, new in pairs):
            return "lost_last_user"
    return None


def _same_part(old: Message, new: Message) -> bool:
    """Whether a message was at most rewritten: it has its role, and makes or answers the same
    calls."""
    if old is new:
        return True
    if old.get("role") != new.get("role") or old.get("tool_call_id") != new.get("tool_call_id"):
        return False
    return new.get("tool_calls") is old.get("tool_calls") or call_ids(old) == call_ids(new)


def _check_rewritten(message: Message) -> None:
    """Whether a message can be sent that answers what it answered before. Raises what says why
    not."""
    msgspec.json.encode(message)
    check_message(0, message, {str(message.get("tool_call_id"))})


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
