"""Judgements on rows that equal doomed ones. Pure.

They don't rely on what a forget noted for itself: a row is another's only if that one computed the
same content, or holds a copy of what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from leyline_engine.proof.doomed import DoomedRow
from leyline_engine.records.lineage import MAX_TOKEN, TOKEN_BITS
from leyline_engine.records.provenance import Content
from leyline_engine.records.sources import SessionKey

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
    """The smaller part of another session's row of the same token is equal."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One way in which a slot can be reached."""

    place: str
    """``pool.tree`` or ``pool.running``."""
    content: Content
    """Identity of what it has read."""
    owners: frozenset[Owner]
    key: int
    """Its radix key."""
    position: int

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

    def by_chance(self, token: int) -> bool:
        """Return True if a row of a token may be equal by chance: its smaller part is."""
        same = any(row.token == token for row in self.rows)
        return same and 2 * self.parts < self.of


def judge(
    row: Equal,
    holders: Iterable[Holder],
    session: SessionKey,
    sent: Callable[[Collection[Owner]], Container[object]],
    *,
    readers: Mapping[int, int],
    again: bool,
) -> Judgement:
    """Judge one row.

    Args:
        holders: those that reach its slot; none for a free slot.
        session: the session that forgot.
        sent: returns the contents that sessions sent, as far as that is known.
        readers: lineages that had read the session's spans when it forgot, and the position from
            which on.
        again: True if the session may have sent the tokens again since the forget.
    """
    found = Judgement.SURVIVOR
    for holder in holders:
        if readers.get(holder.lineage, holder.position + 1) <= holder.position:
            continue
        others, own = holder.owners - {session}, holder.owners & {session}
        if _is_of(row, holder, others, sent):
            return Judgement.KEPT
        if again and _is_of(row, holder, own, sent):
            found = Judgement.SENT_AGAIN
        elif others and row.by_chance(holder.token):
            found = Judgement.CHANCE
    return found


def _is_of(
    row: Equal,
    holder: Holder,
    owners: Collection[Owner],
    sent: Callable[[Collection[Owner]], Container[object]],
) -> bool:
    """Return True if a row is what ``owners`` computed of their text, or a copy of what they or
    others sent."""
    content = holder.content
    ids = {content.id, *content.origins} & {
        found
        for each in row.rows
        if each.token == holder.token
        for found in (each.content.id, *each.content.origins)
    }
    computed = not content.copied and content.id in ids
    return bool(ids and owners) and (computed or any(each in sent(owners) for each in ids))
