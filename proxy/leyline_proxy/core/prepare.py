"""From the client's messages to the messages that are sent, with the cause of each change.

Declared edits come first (they speak of the client's own text), then the policies in order. A
stage that raises or returns nonsense is skipped as a whole; the turn goes on without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import msgspec

from leyline_engine.contract import Mode

from .diff import diff_messages
from .messages import (
    Message,
    MessageError,
    call_ids,
    check_messages,
    fingerprint,
    is_text_only,
)
from .text_edit import TextEditError, replace_spans, replace_text

DECLARED = "declared"
_CONTAINERS = (dict, list)
Fault = Literal["raised", "bad_type", "bad_message", "broken_pair", "lost_last_user"]


@dataclass(frozen=True, slots=True)
class Change:
    """Why a message isn't the client's own, and what its edit promises."""

    cause: str
    """``policy:NAME`` or ``declared``."""
    mode: Mode
    callers_own: bool = False
    """The caller declares that its own change of the message is meant; nothing was rewritten."""


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One message as it is sent."""

    message: Message
    client_index: int | None
    """Its place in the client's list; None for one that a policy put in."""
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class DroppedMessage:
    """A message of the client's that is not sent."""

    client_index: int
    change: Change


@dataclass(frozen=True, slots=True)
class ForgetMark:
    """A client message whose edit demands forgetting: who demands it, and what it became."""

    cause: str
    result: int
    """Fingerprint of what the demand left of the message; 0 where it is gone."""


@dataclass(frozen=True, slots=True)
class PolicyFault:
    """A stage that was skipped; ``policy`` is ``declared`` for the caller's own edits."""

    policy: str
    fault: Fault


@dataclass(frozen=True)  # no slots: fingerprints are computed once
class Prepared:
    """The client's list, the list to send, and how the one became the other."""

    client: tuple[Message, ...]
    sent: tuple[SentMessage, ...]
    dropped: tuple[DroppedMessage, ...] = ()
    faults: tuple[PolicyFault, ...] = ()
    forget_marks: Mapping[int, ForgetMark] = field(default_factory=dict)
    """By index in the client's list. Independent of what other policies did to the message."""
    known_fingerprints: tuple[int, ...] | None = field(default=None, repr=False, compare=False)
    """:attr:`client_fingerprints`, where they were computed before."""

    @property
    def messages(self) -> list[Message]:
        """The messages to send."""
        return [entry.message for entry in self.sent]

    @cached_property
    def client_fingerprints(self) -> tuple[int, ...]:
        """Fingerprints of the client's messages."""
        known = self.known_fingerprints
        return tuple(map(fingerprint, self.client)) if known is None else known

    @cached_property
    def sent_fingerprints(self) -> tuple[int, ...]:
        """Fingerprints of the messages to send."""
        return tuple(map(self._sent_print, self.sent))

    @property
    def sent_as_given(self) -> bool:
        """Whether the client's list is sent as it is: the two lists then compare alike."""
        return self.client_fingerprints == self.sent_fingerprints

    def _sent_print(self, entry: SentMessage) -> int:
        index = entry.client_index
        if index is not None and entry.message is self.client[index]:
            return self.client_fingerprints[index]
        return fingerprint(entry.message)


class DeclaredEdit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An edit that the caller declares itself.

    ``replacement`` without ``chars`` replaces the message's whole text; ``drop`` removes the
    message; neither says that the caller's own change at that message is meant, with this mode.
    """

    message: int
    mode: Mode = Mode.AMORTIZE
    chars: tuple[int, int] | None = None
    replacement: str | None = None
    drop: bool = False

    @property
    def rewrites(self) -> bool:
        """Whether the edit itself changes what is sent."""
        return self.drop or self.replacement is not None


class PolicyLike(Protocol):
    """What a policy looks like from here."""

    @property
    def name(self) -> str: ...

    @property
    def mode(self) -> str: ...

    def transform(self, messages: list[Message], turn_idx: int) -> list[Message]: ...


def prepare(
    client: Sequence[Message],
    policies: Sequence[PolicyLike],
    declared: Sequence[DeclaredEdit],
    turn_index: int,
    *,
    fingerprints: tuple[int, ...] | None = None,
) -> Prepared:
    """Run declared edits and policies over the client's messages. Never raises for their faults.

    Policies that forget run first, on what the client sent, so that none that tidies up can hide
    from them what they look for; they run again in their place where others changed something.

    Args:
        fingerprints: of the client's messages, where already known.
    """
    policies = [policy for policy in policies if getattr(policy, "edits", True)]
    untouched = tuple(SentMessage(message, index) for index, message in enumerate(client))
    stage = _Stage(untouched, (), ())
    if declared:
        stage = _apply_declared(stage, declared)
    for policy in policies:
        if policy.mode == Mode.FORGET:
            stage = _apply_policy(stage, policy, turn_index)
    marks = _forget_marks(stage)
    searched = stage
    for policy in policies:
        if policy.mode == Mode.FORGET and stage is searched:
            continue
        stage = _apply_policy(stage, policy, turn_index)
    return Prepared(
        tuple(client),
        stage.sent,
        stage.dropped,
        tuple(dict.fromkeys(stage.faults)),
        {**_forget_marks(stage), **marks},
        fingerprints,
    )


def _forget_marks(stage: _Stage) -> dict[int, ForgetMark]:
    marks: dict[int, ForgetMark] = {}
    for entry in stage.sent:
        causes = [change.cause for change in entry.changes if change.mode is Mode.FORGET]
        if causes and entry.client_index is not None:
            marks[entry.client_index] = ForgetMark(causes[-1], fingerprint(entry.message))
    for item in stage.dropped:
        if item.change.mode is Mode.FORGET:
            marks[item.client_index] = ForgetMark(item.change.cause, 0)
    return marks


@dataclass(frozen=True, slots=True)
class _Stage:
    sent: tuple[SentMessage, ...]
    dropped: tuple[DroppedMessage, ...]
    faults: tuple[PolicyFault, ...]

    def fault(self, name: str, fault: Fault) -> _Stage:
        return replace(self, faults=(*self.faults, PolicyFault(name, fault)))


def _apply_policy(stage: _Stage, policy: PolicyLike, turn_index: int) -> _Stage:
    name = policy.name
    try:
        mode = Mode(policy.mode)
    except ValueError:
        return stage.fault(name, "bad_type")
    before = [entry.message for entry in stage.sent]
    try:
        after = policy.transform([*map(_copy, before)], turn_index)
    except Exception:  # a policy is a plugin; whatever it raises costs only its own edits
        return stage.fault(name, "raised")
    if isinstance(after, list) and after == before:
        return stage
    fault = find_fault(before, after)
    if fault is not None:
        return stage.fault(name, fault)
    return _advance(stage, before, after, Change(f"policy:{name}", mode))


def find_fault(before: Sequence[Message], after: object) -> Fault | None:
    """What makes ``after`` unfit to be sent in place of ``before``, if anything."""
    if not isinstance(after, list) or not all(isinstance(message, dict) for message in after):
        return "bad_type"
    try:
        msgspec.json.encode(after)
        check_messages(after)
    except MessageError as error:
        return "broken_pair" if error.param.endswith(".tool_call_id") else "bad_message"
    except (TypeError, ValueError, RecursionError):  # nothing that JSON could carry
        return "bad_message"
    if _unanswered(after) - _unanswered(before):
        return "broken_pair"
    last_user = max((i for i, m in enumerate(before) if m.get("role") == "user"), default=None)
    if last_user is not None:
        steps = diff_messages(before, after).steps
        if any(step.kind == "removed" and step.old == last_user for step in steps):
            return "lost_last_user"
    return None


def _unanswered(messages: Iterable[Message]) -> set[str]:
    """Ids of tool calls without a result."""
    called: set[str] = set()
    answered: set[object] = set()
    for message in messages:
        called.update(call_ids(message))
        if message.get("role") == "tool":
            answered.add(message.get("tool_call_id"))
    return called - answered


def _advance(
    stage: _Stage, before: Sequence[Message], after: Sequence[Message], change: Change
) -> _Stage:
    """Carry provenance over one policy."""
    sent: list[SentMessage] = []
    dropped = list(stage.dropped)
    for step in diff_messages(before, after).steps:
        entry = stage.sent[step.old] if step.old is not None else None
        if step.new is None:
            if entry is not None and entry.client_index is not None:
                dropped.append(DroppedMessage(entry.client_index, change))
        elif entry is None:
            sent.append(SentMessage(after[step.new], None, (change,)))
        elif step.kind == "replaced":
            changes = (*entry.changes, change)
            sent.append(SentMessage(after[step.new], entry.client_index, changes))
        elif entry.message == after[step.new]:
            sent.append(entry)
        else:  # only a volatile marker differs: no edit, but what the policy wants is sent
            sent.append(replace(entry, message=after[step.new]))
    return replace(stage, sent=tuple(sent), dropped=tuple(dropped))


def _apply_declared(stage: _Stage, declared: Sequence[DeclaredEdit]) -> _Stage:
    by_message: dict[int, list[DeclaredEdit]] = {}
    for edit in declared:
        by_message.setdefault(edit.message, []).append(edit)
    sent: list[SentMessage] = []
    dropped: list[DroppedMessage] = []
    if any(not 0 <= index < len(stage.sent) for index in by_message):
        return stage.fault(DECLARED, "bad_message")
    for index, entry in enumerate(stage.sent):
        edits = by_message.get(index, [])
        changes = tuple(
            dict.fromkeys(Change(DECLARED, edit.mode, not edit.rewrites) for edit in edits)
        )
        if any(edit.drop for edit in edits):
            mode = Mode.FORGET if any(c.mode is Mode.FORGET for c in changes) else Mode.AMORTIZE
            dropped.append(DroppedMessage(index, Change(DECLARED, mode)))
            continue
        try:
            message = _rewritten(entry.message, edits)
        except TextEditError:
            return stage.fault(DECLARED, "bad_message")
        sent.append(replace(entry, message=message, changes=changes))
    before = [entry.message for entry in stage.sent]
    fault = find_fault(before, [entry.message for entry in sent])
    if fault is not None:
        return stage.fault(DECLARED, fault)
    return replace(stage, sent=tuple(sent), dropped=tuple(dropped))


def _rewritten(message: Message, edits: Sequence[DeclaredEdit]) -> Message:
    spans = sorted(
        (edit.chars[0], edit.chars[1], edit.replacement)
        for edit in edits
        if edit.chars is not None and edit.replacement is not None
    )
    whole = [edit.replacement for edit in edits if edit.chars is None]
    texts = [text for text in whole if text is not None]
    if spans and texts:
        raise TextEditError("a message's text is replaced both as a whole and in part")
    if spans:
        return replace_spans(message, spans)
    return replace_text(message, texts[-1]) if texts else message


def _copy(message: Message) -> Message:
    """A message that a policy may change as it likes."""
    copied: Message = dict(message) if is_text_only(message) else clone(message)
    return copied


def clone(value: Any) -> Any:
    """A deep copy of JSON-shaped data."""
    if isinstance(value, dict):
        return {
            key: clone(item) if isinstance(item, _CONTAINERS) else item
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [clone(item) if isinstance(item, _CONTAINERS) else item for item in value]
    return value
