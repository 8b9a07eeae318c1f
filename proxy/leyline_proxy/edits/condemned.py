"""Messages in quarantine: those that a session has there already, and those that come to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import msgspec

from leyline_engine.contract import Mode as EditMode
from leyline_policies import Memo
from leyline_policies.context import Context
from leyline_policies.conversation import map_text
from leyline_policies.faults import OnFault
from leyline_policies.marks import MarkedMessage
from leyline_policies.policy import Message, Mode
from leyline_policies.recall import Evicted, evicted_by
from leyline_policies.verbs import quarantined, quarantined_for

from ..model.prepared import POLICY, Quarantined, SentMessage
from .edited import Sensitive
from .stage import Stage

_UNADDRESSED = "unaddressed"


@dataclass(frozen=True, slots=True)
class Condemned:
    """Carry out one policy's verdicts of earlier turns. Its edits are the same as that policy's."""

    mode: ClassVar[Mode] = "forget"
    trusted: ClassVar[bool] = True
    on_fault: ClassVar[OnFault] = "refuse"

    name: str
    whys: Mapping[int, str]
    """Words of the stubs, by place in the list."""

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with stubs."""
        stubbed = list(messages)
        for place, why in self.whys.items():
            make = partial(quarantined, why=why)
            stubbed[place] = context.once(messages[place], make, ("quarantined", why))
        return stubbed


def condemnations(stage: Stage, condemned: Mapping[int, Quarantined]) -> Iterator[Condemned]:
    """Yield the policies that put stubs in the places of condemned messages.

    Args:
        condemned: by index in the client's list.
    """
    if not condemned:
        return
    places = {entry.client_index: at for at, entry in enumerate(stage.sent)}
    by_policy: dict[str, dict[int, str]] = {}
    for index, (policy, why) in condemned.items():
        if index in places:  # a declared edit may have dropped it
            by_policy.setdefault(policy, {})[places[index]] = why
    for policy, whys in by_policy.items():
        yield Condemned(policy, whys)


def without_addresses(stage: Stage, memo: Memo, sensitive: Sensitive | None = None) -> Stage:
    """Return the list without the addresses of texts that are forgotten after all.

    A policy that evicts may take out what only a later check finds to be sensitive. An address is a
    hash of the text, by which a guess could be confirmed.

    Args:
        sensitive: finds content whose removal is a forget.
    """
    concerned = [
        sensitive is not None or any(change.mode is EditMode.FORGET for change in entry.changes)
        for entry in stage.sent
    ]
    if not any(concerned):
        return stage
    bare = partial(_unaddressed, sensitive)
    sent = tuple(
        memo.get(entry, (_UNADDRESSED, sensitive is None), bare)
        if each and isinstance(entry.message, MarkedMessage)
        else entry
        for entry, each in zip(stage.sent, concerned, strict=True)
    )
    return stage if sent == stage.sent else replace(stage, sent=sent)


def _unaddressed(sensitive: Sensitive | None, entry: SentMessage) -> SentMessage:
    message, parts = entry.message, evicted_by(entry.message)
    if not any(_is_forgotten(part, entry) or _hides(sensitive, part, message) for part in parts):
        return entry
    for part in parts:
        bare = part.stub.replace(f", {part.address}", "")
        message = map_text(message, partial(_replaced, part.stub, bare))
    # A plain message has no parts that could be kept.
    return msgspec.structs.replace(entry, message=dict(message))


def _is_forgotten(part: Evicted, entry: SentMessage) -> bool:
    """Return True if a forget concerns a message since a part was made of it."""
    own = [each.cause.split(":")[1:2] == [part.policy] for each in entry.changes]
    since = own.index(True) if True in own else 0
    return any(change.mode is EditMode.FORGET for change in entry.changes[since:])


def _hides(sensitive: Sensitive | None, part: Evicted, bearer: Message) -> bool:
    """Return True if a part has sensitive content that the message with its stub doesn't show.

    The message may bear the stub of others, which were removed and are forgotten for it.
    """
    if sensitive is None:
        return False
    found = sensitive({"role": part.role or "user", "content": part.text})
    return bool(found) and bool(found - sensitive(bearer))


def _replaced(old: str, new: str, text: str) -> str:
    return text.replace(old, new)


def newly_quarantined(before: Stage, after: Stage) -> Iterator[tuple[int, Quarantined]]:
    """Yield the messages that one policy replaced by stubs, by index in the client's list."""
    if after.demands == before.demands:
        return
    for entry in after.sent:
        place = entry.client_index
        if place is None or not entry.changes or after.demands.get(place) is None:
            continue
        why, change = quarantined_for(entry.message), entry.changes[-1]
        kind, _, cause = change.cause.partition(":")
        if why is not None and kind == POLICY:
            yield place, Quarantined(cause.removesuffix(f":{why}"), why)
