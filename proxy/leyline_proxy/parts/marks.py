"""Marks, which say what a forget reaches. Pure.

A forget writes its mark before it deletes anything, and every reader looks at the marks. So a text
that a forget reaches can't be recalled from then on, whether its deletion was interrupted or the
text is put again by a turn that was planned before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..model.parts import PartFacts
from .limits import FLOOR_S, MAX_FORGOTTEN

NOTHING = -1
"""For :attr:`Mark.demands` of a mark that reaches nothing by demands."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The reach of a forget, or of the deletion of a session."""

    demands: int = NOTHING
    """It reaches texts of turns with at most so many."""
    turn: str = ""
    """The turn whose texts it doesn't reach; empty if it reaches all turns'."""
    before: float = -1.0
    """It reaches texts of turns that were planned until then; seconds since the epoch."""
    forgotten: tuple[str, ...] = ()
    """Addresses of the texts that were removed, oldest first."""
    barred: frozenset[str] = frozenset()
    """Addresses of texts that it reaches whichever turn puts them, for as long as it lasts."""
    closed: bool = False
    """True if it reaches all texts: more were barred than it can name."""

    def reaches(self, facts: PartFacts) -> bool:
        """Return True if it reaches a text that was put before it."""
        if self.closed or facts.holds_any(self.barred) or facts.created <= self.before:
            return True
        return facts.demands <= self.demands and (not self.turn or facts.turn != self.turn)

    def encoded(self) -> bytes:
        """Return the stored form."""
        reach = (self.demands, self.turn, self.before, self.forgotten)
        return json.dumps([*reach, sorted(self.barred), self.closed]).encode()

    @staticmethod
    def decoded(data: bytes) -> Mark | None:
        """Return the mark; None if the data is none."""
        try:
            demands, turn, before, forgotten, *bars = json.loads(data)
            barred, closed = bars or ((), False)  # earlier releases wrote neither
            return Mark(
                int(demands),
                str(turn),
                float(before),
                (*map(str, forgotten),),
                frozenset(map(str, barred)),
                bool(closed),
            )
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class WrittenMark:
    """A mark in a store."""

    at: float
    """Time of its writing, in seconds since the epoch."""
    mark: Mark | None
    """None if it can't be read."""

    def reaches(self, facts: PartFacts, put_at: float) -> bool:
        """Return True if it reaches a text that was put then; an unreadable mark reaches all."""
        mark = self.mark
        if mark is not None and (mark.closed or facts.holds_any(mark.barred)):
            return True  # whenever the text was put
        if put_at > self.at + FLOOR_S:
            return False
        return mark is None or mark.reaches(facts)


def reached(marks: Iterable[WrittenMark], facts: PartFacts, put_at: float) -> bool:
    """Return True if any of the marks reaches a text."""
    return any(mark.reaches(facts, put_at) for mark in marks)


def joined(new: Mark, marks: Iterable[WrittenMark], now: float) -> Mark:
    """Return one mark that reaches what a new one does and what others still do."""
    for each in marks:
        old = each.mark
        if old is None:  # it may have been any
            new = replace(new, before=max(new.before, each.at))
            continue
        new = barring(new, old.barred, closed=old.closed)
        new = replace(new, forgotten=with_forgotten(old.forgotten, new.forgotten))
        if now <= each.at + FLOOR_S:
            new = replace(new, before=max(new.before, old.before))
            if old.demands > new.demands:
                new = replace(new, demands=old.demands, turn=old.turn)
            elif old.demands == new.demands and old.turn != new.turn:
                new = replace(new, turn="")
    return new


def barring(mark: Mark, addresses: Iterable[str], *, closed: bool = False) -> Mark:
    """Return a mark that bars more addresses; of too many to name, one that reaches all texts."""
    barred = mark.barred.union(addresses)
    if closed or mark.closed or len(barred) > MAX_FORGOTTEN:
        return replace(mark, barred=frozenset(), closed=True)
    return replace(mark, barred=barred)


def with_forgotten(known: tuple[str, ...], more: Iterable[str]) -> tuple[str, ...]:
    """Return addresses without repetition, the latest last; of too many, the latest."""
    return tuple(dict.fromkeys((*known, *more)))[-MAX_FORGOTTEN:]
