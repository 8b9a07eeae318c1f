"""Texts that are derived from messages to be forgotten: those that models wrote after reading one
of them, or after reading a text that is derived itself. Pure; names only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .readings import Readings, Text
from .spans import SpanNames

MAX_LISTED = 256
"""Largest number of texts in an account, which counts the others."""

Relation = Literal["direct", "transitive", "unknown"]
_ORDER: tuple[Relation, ...] = ("direct", "transitive", "unknown")
_RANK = {"message": 0, "answer": 1, "policy": 2}
"""Order of a turn's texts: its messages come before its answer."""


@dataclass(frozen=True, slots=True)
class DerivedText:
    """A text that isn't to be forgotten itself."""

    span: str
    """Its name in the session's ledger."""
    message: int | None
    """Index in the client's list; None if that lacks it."""
    role: str
    """The message's; ``policy`` for a text that a model wrote for a policy."""
    read: Relation
    """``direct``: it was written from a forgotten message, or from KV that may have read one;
    ``transitive``: from a derived text; ``unknown``: it came after a forgotten message, and its
    author isn't known."""


@dataclass(frozen=True, slots=True)
class Derived:
    """The texts that are derived from what one demand forgets."""

    texts: tuple[DerivedText, ...] = ()
    """Oldest first."""
    complete: bool = False
    """True if there are no others in this session."""

    def account(self) -> dict[str, Any]:
        """Return the members of an account: the texts' names, and the number of those left out."""
        listed = [
            {"span": each.span, "message": each.message, "role": each.role, "read": each.read}
            for each in self.texts[:MAX_LISTED]
        ]
        members: dict[str, Any] = {"derived": listed, "derived_complete": self.complete}
        if len(self.texts) > MAX_LISTED:
            members["derived_omitted"] = len(self.texts) - MAX_LISTED
        return members


def derived_from(
    readings: Readings,
    forgotten: Collection[str],
    names: SpanNames | None,
    *,
    also: Collection[str] = (),
    now: int | None = None,
    kept: Collection[str] = (),
    certain: bool = True,
) -> Derived:
    """Return the texts that are derived from messages.

    Args:
        forgotten: every name that the messages have or may have had.
        names: of the newest list; None if there is none.
        also: names of texts that are out of the session, these messages among them.
        now: number of the turn that forgets the messages, and so doesn't read them any more.
        kept: questions whose answers the policies keep.
        certain: False if the session may have texts that aren't known here.
    """
    tracing = _Tracing(readings, forgotten, also, now)
    ordered = sorted(readings.texts, key=lambda text: (text.index, _RANK[text.kind]))
    for text in ordered:
        tracing.follow(text)
    found: list[DerivedText] = []
    for text in ordered:
        relation = tracing.found.get(text.name)
        gone = text.forgotten or text.name in also
        if relation is None or gone or (text.kind == "policy" and text.key not in kept):
            continue
        place = names.index.get(text.name) if names is not None else None
        found.append(DerivedText(text.name, place, text.role, relation))
    firsts = [readings.came(name) for name in forgotten]
    known = all(first is not None and first >= readings.before for first in firsts)
    complete = certain and known and "unknown" not in tracing.found.values()
    return Derived(tuple(found), complete)


class _Tracing:
    """The relation of each text to forgotten messages, followed from the oldest to the newest."""

    def __init__(
        self, readings: Readings, forgotten: Collection[str], also: Collection[str], now: int | None
    ) -> None:
        self.found: dict[str, Relation] = {}
        self._readings = readings
        self._forgotten = forgotten
        self._also = also
        self._now = now
        last = max((text.index for text in readings.texts), default=-1)
        self._turns: Mapping[Relation, bytearray] = {
            relation: bytearray(last + 1) for relation in _ORDER
        }
        """Turns whose prompt held a text of this relation; for ``direct``, a forgotten message."""
        self._first: dict[Relation, int] = {}
        """The first of these turns."""
        for name in forgotten:
            self._note("direct", name)

    def follow(self, text: Text) -> None:
        """Find a text's relation, after those of all older texts."""
        relation = self._relation(text)
        if relation is None:
            return
        self.found[text.name] = relation
        # What reads it is derived at second hand, whoever wrote it.
        self._note(
            "unknown" if relation == "unknown" else "transitive",
            text.name,
            before=self._now if text.name in self._also else None,
        )

    def _relation(self, text: Text) -> Relation | None:
        if text.kind == "message":
            been = [self.found[name] for name in text.former if name in self.found]
            if been:
                return min(been, key=_ORDER.index)
            strange = text.strange and any(
                self._readings.comes_before(name, text) for name in self._forgotten
            )
            return "unknown" if strange else None
        return next((each for each in _ORDER if self._reads(text, each)), None)

    def _reads(self, text: Text, relation: Relation) -> bool:
        if relation == "direct" and text.index == self._now:
            return False  # the KV that had read it is forgotten first
        if self._turns[relation][text.index]:
            return True
        return text.hidden and self._first.get(relation, text.index + 1) <= text.index

    def _note(self, relation: Relation, name: str, before: int | None = None) -> None:
        turns = self._turns[relation]
        for first, end in self._readings.read.get(name, ()):
            last = min(end, len(turns), end if before is None else before)
            if first < last:
                turns[first:last] = b"\x01" * (last - first)
                self._first[relation] = min(first, self._first.get(relation, first))
