"""A turn's messages as they are sent, and how each came from the client's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from leyline_engine.contract import Mode
from leyline_policies import Note
from leyline_policies.context import Completion

from .messages import Message, fingerprint

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
    """Why a message isn't the client's own, and what its edit promises."""

    cause: str
    """``policy:NAME``, ``policy:NAME:CAUSE`` or ``declared``."""
    mode: Mode
    callers_own: bool = False
    """The caller declares that its own change of the message is meant; nothing was rewritten."""


class SentMessage(msgspec.Struct, frozen=True, gc=False):  # no cycle leads through it
    """One message as it is sent."""

    message: Message
    client_index: int | None
    """Its place in the client's list; None for one that a policy put in."""
    changes: tuple[Change, ...] = ()
    moved_from: int | None = None
    """Its place in the client's list, where a policy moved it past others or sent it twice."""


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
    """A policy that failed."""

    policy: str
    fault: Fault


class Fingerprinted(NamedTuple):
    """A list with the fingerprint of each of its messages."""

    items: tuple[object, ...]
    """Messages, or messages as they are sent; only the list's identity matters."""
    fingerprints: tuple[int, ...]


@dataclass(frozen=True)  # no slots: fingerprints are computed once
class Prepared:
    """The client's list, the list to send, and how the one became the other."""

    client: tuple[Message, ...]
    sent: tuple[SentMessage, ...]
    dropped: tuple[DroppedMessage, ...] = ()
    faults: tuple[PolicyFault, ...] = ()
    forget_marks: Mapping[int, ForgetMark] = field(default_factory=dict)
    """By index in the client's list. Independent of what other policies did to the message."""
    notes: tuple[Note, ...] = ()
    """What policies reported."""
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """What policies left for the session's next turn, by their place in the pipeline."""
    wanted: tuple[Completion, ...] = field(default=(), repr=False)
    """What policies ask a model to write, beside the request."""
    scope: str | None = None
    """Scope to share what is spliced with, that messages name; None for none, or several."""
    pins: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """What is said of KV that stays, by index in the client's list: policies' word included."""
    used: frozenset[str] = frozenset()
    """Keys of what models wrote that policies still ask for."""
    refused: PolicyFault | None = None
    """Why the request must not be sent: a policy that was to take something out of it failed."""
    known_fingerprints: tuple[Fingerprinted, ...] = field(default=(), repr=False, compare=False)
    """What fingerprints of the two lists, or of such as they were made of, are known."""

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
        """Whether the client's list is sent as it is: the two lists then compare alike."""
        return self.client_fingerprints == self.sent_fingerprints

    def changes_of_policies(self) -> Iterator[tuple[str, str]]:
        """Policy and mode of each change of a message that is sent, and of each one left out."""
        changes = [change for entry in self.sent for change in entry.changes]
        for change in (*changes, *(item.change for item in self.dropped)):
            kind, _, name = change.cause.partition(":")
            if kind == POLICY:
                yield name.partition(":")[0], change.mode.value

    def _known(self, items: object) -> tuple[int, ...] | None:
        """The fingerprints of this very list."""
        return next((each for held, each in self.known_fingerprints if held is items), None)
