"""A turn's messages as sent, and the origin of each in the client's list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from leyline_engine.contract import Mode
from leyline_policies import Note
from leyline_policies.context import Completion
from leyline_policies.recall import Evicted

from .messages import Message, fingerprint
from .working_set import WorkingSet

DECLARED = "declared"
POLICY = "policy"
Fault = Literal[
    "raised",
    "timed_out",
    "bad_type",
    "bad_message",
    "bad_state",
    "mutated",
    "broken_pair",
    "lost_last_user",
]


@dataclass(frozen=True, slots=True)
class Change:
    """The reason for a difference from the client's message, and the mode of the edit."""

    cause: str
    """``policy:NAME``, ``policy:NAME:CAUSE`` or ``declared``."""
    mode: Mode
    callers_own: bool = False
    """True if the caller declares its own change of the message; nothing was rewritten."""


class SentMessage(msgspec.Struct, frozen=True, gc=False):  # no cycle leads through it
    """One message of the sent list."""

    message: Message
    client_index: int | None
    """Index in the client's list; None for a message that a policy inserted."""
    changes: tuple[Change, ...] = ()
    moved_from: int | None = None
    """Index in the client's list, if a policy moved the message past others or sent it twice."""


@dataclass(frozen=True, slots=True)
class DroppedMessage:
    """A message of the client's list that isn't sent."""

    client_index: int
    change: Change


@dataclass(frozen=True, slots=True)
class ForgetMark:
    """A client message whose edit demands forgetting: the demand's cause, and the edit's result."""

    cause: str
    result: int
    """Fingerprint of the remaining message; 0 if it is gone."""


class Quarantined(NamedTuple):
    """The reason for a message's quarantine."""

    policy: str
    """Name of the policy whose edit it is."""
    why: str
    """The word for it, in the edit's cause and in the stub."""


@dataclass(frozen=True, slots=True)
class FaultOrigin:
    """The place where a policy raised or hung, without an error's words: they may quote a
    prompt."""

    error: str
    """Name of the error's type; ``timeout`` if it hung."""
    frames: tuple[str, ...]
    """File, line and function of the policy's innermost calls, the innermost last."""


@dataclass(frozen=True, slots=True)
class PolicyFault:
    """A policy that failed."""

    policy: str
    fault: Fault
    origin: FaultOrigin | None = field(default=None, compare=False)
    """None if it neither raised nor hung."""


class Fingerprinted(NamedTuple):
    """A list with the fingerprint of each of its messages."""

    items: tuple[object, ...]
    """Messages, or messages as they are sent; only the list's identity matters."""
    fingerprints: tuple[int, ...]


@dataclass(frozen=True)  # no slots: fingerprints are computed once
class Prepared:
    """The client's list, the list to send, and the changes between them."""

    client: tuple[Message, ...]
    sent: tuple[SentMessage, ...]
    dropped: tuple[DroppedMessage, ...] = ()
    faults: tuple[PolicyFault, ...] = ()
    forget_marks: Mapping[int, ForgetMark] = field(default_factory=dict)
    """Marks by index in the client's list, whatever other policies did to the message."""
    notes: tuple[Note, ...] = ()
    """Reports of policies."""
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """State that policies left for the session's next turn, by their place in the pipeline."""
    wanted: tuple[Completion, ...] = field(default=(), repr=False)
    """Texts that policies want a model to write, apart from the request."""
    scope: str | None = None
    """Scope, named by messages, within which to share spliced KV; None for no name or several."""
    pins: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Requests to keep KV, by index in the client's list, including those of policies."""
    used: frozenset[str] = frozenset()
    """Keys of the models' texts that policies still ask for."""
    refused: PolicyFault | None = None
    """The failure of a policy that had to remove something: the request must not be sent."""
    quarantined: Mapping[int, Quarantined] = field(default_factory=dict)
    """Messages that a stub replaces for good, by index in the client's list."""
    evicted: tuple[Evicted, ...] = field(default=(), repr=False)
    """Texts that policies evicted with an address in their stubs."""
    recalls: bool = False
    """True if evicted texts were put back."""
    forgets_recalled: bool = False
    """True if a policy forgets something of them."""
    working_set: WorkingSet | None = None
    """The changes that the request's working set made; None if it names none."""
    known_fingerprints: tuple[Fingerprinted, ...] = field(default=(), repr=False, compare=False)
    """Known fingerprints of the two lists, or of lists that they were made from."""

    @property
    def messages(self) -> list[Message]:
        """The messages to send."""
        return [entry.message for entry in self.sent]

    @cached_property
    def client_fingerprints(self) -> tuple[int, ...]:
        """Fingerprints of the client's messages."""
        known = self._known(self.client)
        return tuple(map(fingerprint, self.client)) if known is None else known

    @cached_property
    def sent_fingerprints(self) -> tuple[int, ...]:
        """Fingerprints of the messages to send."""
        known = self._known(self.sent)
        if known is not None:
            return known
        own = dict(zip(map(id, self.client), self.client_fingerprints, strict=True))
        messages = (entry.message for entry in self.sent)
        return tuple(own[id(m)] if id(m) in own else fingerprint(m) for m in messages)

    @property
    def sent_as_given(self) -> bool:
        """True if the client's list is sent unchanged: the two lists then compare alike."""
        return self.client_fingerprints == self.sent_fingerprints

    def changes_of_policies(self) -> Iterator[tuple[str, str]]:
        """Yield the policy and mode of each change of a sent message, and of each dropped one."""
        changes = [change for entry in self.sent for change in entry.changes]
        for change in (*changes, *(item.change for item in self.dropped)):
            kind, _, name = change.cause.partition(":")
            if kind == POLICY:
                yield name.partition(":")[0], change.mode.value

    def _known(self, items: object) -> tuple[int, ...] | None:
        """Return the fingerprints of this very list, if known."""
        return next((each for held, each in self.known_fingerprints if held is items), None)
