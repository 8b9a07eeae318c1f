"""Judgements on rows that equal doomed ones. Pure.

They don't rely on what a forget noted for itself: a row is another's only if that one sent the
same tokens from the beginning of its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass
from enum import Enum

from leyline_engine.lineage import MAX_TOKEN, TOKEN_BITS
from leyline_engine.proof.doomed import DoomedRow
from leyline_engine.sources import SessionKey

Owner = SessionKey | None
"""A session that holds a row; None for requests without one, or too many sessions to note."""


class Judgement(Enum):
    """Judgements on a row that equals a doomed one."""

    SURVIVOR = "survivor"
    KEPT = "kept"
    """Another session sent the same tokens itself."""
    SENT_AGAIN = "sent_again"
    """The session sent them again after the forget."""
    CHANCE = "chance"
    """The smaller part of a row that another session computed of the same token is equal."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One way in which a slot can be reached."""

    place: str
    """``pool.tree`` or ``pool.running``."""
    path: bytes | None
    """Its exact path; None if something was spliced into it."""
    owners: frozenset[Owner]
    key: int
    """Its radix key."""

    @property
    def lineage(self) -> int:
        """Its lineage, as radix keys carry it; 0 for none."""
        return self.key >> TOKEN_BITS

    @property
    def token(self) -> int:
        """Its token."""
        return self.key & MAX_TOKEN


@dataclass(frozen=True, slots=True)
class Equal:
    """A row that equals doomed ones.

    Attributes:
        rows: the doomed rows.
        parts: number of its parts that are equal.
        of: number of parts that were compared.
    """

    rows: Collection[DoomedRow]
    parts: int
    of: int

    @property
    def copied(self) -> bool:
        """True if the session had it only as a copy, perhaps of what another one computed."""
        return all(row.path is None for row in self.rows)

    def by_chance(self, token: int) -> bool:
        """Return True if a computed row of a token may be equal by chance: its smaller part is."""
        same = any(row.token == token for row in self.rows)
        return same and 2 * self.parts < self.of


def judge(
    row: Equal,
    holders: Iterable[Holder],
    session: SessionKey,
    sent: Callable[[Collection[Owner]], Container[object]],
    *,
    readers: Collection[int],
    again: bool,
) -> Judgement:
    """Judge one row.

    Args:
        holders: those that reach its slot; none for a free slot.
        session: the session that forgot.
        sent: returns the exact paths that sessions sent, as far as that is known.
        readers: lineages that had read the session's spans when it forgot.
        again: True if the session may have sent the tokens again since the forget.
    """
    found = Judgement.SURVIVOR
    for holder in holders:
        others = holder.owners - {session}
        lent = row.copied and others and holder.lineage not in readers
        if lent or _sent_by(row, holder, others, sent):
            return Judgement.KEPT
        if again and _sent_by(row, holder, holder.owners & {session}, sent):
            found = Judgement.SENT_AGAIN
        elif others and holder.path is not None and row.by_chance(holder.token):
            found = Judgement.CHANCE
    return found


def _sent_by(
    row: Equal,
    holder: Holder,
    owners: Collection[Owner],
    sent: Callable[[Collection[Owner]], Container[object]],
) -> bool:
    """Return True if one of ``owners`` sent the tokens that a doomed row has read."""
    if not owners:
        return False
    if holder.path is not None:
        return any(doomed.path == holder.path for doomed in row.rows)
    # Spliced: a copy of what its owner sent at another place.
    known = sent(owners)
    return any(doomed.path in known for doomed in row.rows)
