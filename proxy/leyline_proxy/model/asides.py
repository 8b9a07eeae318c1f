"""Calls of the recall tool that the proxy answers itself, out of the client's sight.

An aside is what a turn has between the client's last message and the answer that the client gets::

    client     … │ user                            │ answer            │ user …
    engine     … │ user │ calls │ results │ calls… │ rest of the answer│ user …
                        ╰── an aside ───╯
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

RECALL_TOOL = "leyline_recall"
"""Name of the tool by which a model gets evicted texts back."""

MAX_ASIDES = 256
"""Asides that a session remembers; of more, the oldest are dropped from its prompts."""

_CALL_BYTES = 512

NotRecalled = Literal[
    "unknown",
    "ambiguous",
    "malformed",
    "forgotten",
    "over_budget",
    "repeated",
    "limit",
    "store_down",
]
"""The reason that a text wasn't put back."""

_REASONS: Mapping[NotRecalled, str] = {
    "unknown": "no text with this address was evicted from this conversation, or it has expired",
    "ambiguous": "several addresses begin like this; give the whole address",
    "malformed": "an address is sha256: and the digits after it in a stub",
    "forgotten": "the text was removed for good",
    "over_budget": "it is too long for what may be recalled in this turn",
    "repeated": "it was recalled already, in an earlier result of this turn",
    "limit": "no more texts can be recalled in this turn; continue without them",
    "store_down": "evicted texts can't be read at the moment",
}


def note_of(cause: NotRecalled) -> str:
    """Return the text in place of one that wasn't put back, for the model."""
    return f"[not recalled: {_REASONS[cause]}]"


@dataclass(frozen=True, slots=True)
class RecallCall:
    """One call of the recall tool."""

    id: str
    arguments: str
    """JSON of an object; as the model wrote them, if that is what they are."""
    place: int
    """Place among the calls of its message."""
    address: str = ""
    """Whole address of the recalled text; empty if none was."""
    cause: NotRecalled | None = None
    """The reason that no text was recalled."""
    tokens: int = 0
    """Approximate tokens of the text; its price, if it was too long."""
    policy: str = ""
    """Policy that had evicted it."""
    own: bool = False
    """True if no model made the call: the proxy did, for a working set."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """The client's message that an aside comes after."""

    print: int
    """Its fingerprint."""
    nth: int
    """Number of equal messages in front of it."""


@dataclass(frozen=True, slots=True)
class Aside:
    """One message of the model with calls of the recall tool, and their results."""

    anchor: Anchor
    calls: tuple[RecallCall, ...]
    text: str = field(default="", repr=False)
    """Text that the model wrote in front of the calls; the client has it in its answer."""
    reasoning: str = field(default="", repr=False)
    own: tuple[str, ...] = ()
    """Ids of the calls of the client's tools in the message: the client has it, without the others.
    """

    @property
    def weight(self) -> int:
        """Approximate bytes in memory."""
        written = sum(len(call.arguments) + _CALL_BYTES for call in self.calls)
        return len(self.text) + len(self.reasoning) + written

    @property
    def joined(self) -> bool:
        """True if the client has the message, without these calls."""
        return bool(self.own)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the recalled texts."""
        return tuple(call.address for call in self.calls if call.address)


@dataclass(frozen=True, slots=True)
class RecalledTexts:
    """The state of the addresses that a turn's messages and asides name."""

    texts: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Texts by whole address."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Whole addresses by the addresses as written, if they differ."""
    causes: Mapping[str, NotRecalled] = field(default_factory=dict)
    """The reasons for those that can't be put back."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Policies that evicted the texts, by whole address."""
    limit_tokens: int | None = None
    """Most tokens that references put back in one prompt; None for no limit."""

    def has(self, address: str) -> bool:
        """Return True if there is a text for an address as written."""
        return self.whole.get(address, address) in self.texts

    def text_of(self, address: str) -> str:
        """Return the text, or the note in its place."""
        found = self.texts.get(self.whole.get(address, address))
        return note_of(self.causes.get(address, "unknown")) if found is None else found

    def judged(self, references: Sequence[Sequence[str]]) -> list[tuple[NotRecalled | None, ...]]:
        """Return the reasons that references aren't filled, by message; None for those that are.

        The latest messages come first. A text counts each time that it is referred to: a line of
        fifty characters may stand for megabytes.
        """
        left, found = self.limit_tokens, list[tuple[NotRecalled | None, ...]]()
        for written in reversed(references):
            causes: list[NotRecalled | None] = []
            for address in written:
                cause = None if self.has(address) else self.causes.get(address, "unknown")
                if cause is None and left is not None:
                    tokens = tokens_in(self.text_of(address))
                    cause = "over_budget" if tokens > left else None
                    left -= tokens if cause is None else 0
                causes.append(cause)
            found.append(tuple(causes))
        return found[::-1]


def tokens_in(text: str) -> int:
    """Return the approximate number of a text's tokens: one for four bytes of UTF-8."""
    return len(text.encode("utf-8", "surrogatepass")) // 4 + 3


def anchor_of(prints: Sequence[int], place: int) -> Anchor:
    """Return the anchor at a place of a list.

    Args:
        prints: fingerprints of the list's messages.
    """
    return Anchor(prints[place], prints[:place].count(prints[place]))


def places_of(anchors: Collection[Anchor], prints: Sequence[int]) -> dict[Anchor, int]:
    """Return the places of anchors in a list, without those that the list lacks.

    Args:
        prints: fingerprints of the list's messages.
    """
    found: dict[int, list[int]] = {anchor.print: [] for anchor in anchors}
    for place, value in enumerate(prints):
        if value in found:
            found[value].append(place)
    return {
        anchor: found[anchor.print][anchor.nth]
        for anchor in anchors
        if anchor.nth < len(found[anchor.print])
    }
