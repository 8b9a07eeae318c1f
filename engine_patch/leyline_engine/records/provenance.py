"""Origins of copied KV: who had sent what a splice copies, and which positions are copies.

Retained turns show what a session sent, but a session's oldest turns are dropped while copies of
their KV stay. Proofs of forgets need to know it. Bounded; digests under a secret of this process,
no tokens.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_bytes
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from leyline_engine.contract import CopySegment
from leyline_engine.records.lineage import MAX_TOKEN, TOKEN_BITS, fold_keys
from leyline_engine.records.paths import (
    SECRET_BYTES,
    Paths,
    PathState,
    Sums,
)
from leyline_engine.records.sources import SessionKey, SourceTurn

MAX_PATHS = 1 << 21
"""Copied tokens noted, of eight bytes each; the least recently splicing sessions are dropped."""

MAX_LINEAGES = 1 << 13
"""Lineages whose copies are noted; more than a ledger knows."""

MAX_RANGES = 256
"""Runs of copies of a lineage; with more, its rows equal nobody else's."""

_PORTION = 1 << 12
"""Tokens whose paths are noted at once, in a millisecond or less."""


_COPY = 1 << 62
"""Mark of keys in contents: a copy of what the other bits name."""

MAX_PROMPTS = 64
"""Latest prompts of a shared lineage whose copies are noted."""

_Ranges = dict[tuple[int, int], Sums]
"""Content of copied positions, by the first and the end of each run."""


@dataclass(frozen=True, slots=True)
class _Copied:
    """Copies of a lineage: those of its splice, or of each prompt that shares it."""

    ranges: Sequence[_Ranges]
    shared: bool

    @property
    def length(self) -> int:
        """Number of copied positions."""
        return sum(len(ids) for some in self.ranges for ids in some.values())


class Content(NamedTuple):
    """Identity of what a row has read."""

    id: int
    """Equal for rows that have read the same: the head of the path that a row was computed on, and
    for a copy the id of the row that it is of."""
    copied: bool = False
    origins: tuple[int, ...] = ()
    """Ids of rows that it may be a copy of: several prompts have its lineage."""


class Contents(NamedTuple):
    """Contents of a run of keys.

    Attributes:
        ids: ``[n]`` uint64.
        copies: ``[n]``, True for copies.
        origins: see :attr:`Content.origins`, by index.
    """

    ids: Sums
    copies: NDArray[np.bool_]
    origins: Mapping[int, tuple[int, ...]]

    def after(self, start: int) -> Contents:
        """Return those from an index on."""
        later = {at - start: found for at, found in self.origins.items() if at >= start}
        return Contents(self.ids[start:], self.copies[start:], later)

    def at(self, index: int) -> Content:
        """Return one."""
        return Content(int(self.ids[index]), bool(self.copies[index]), self.origins.get(index, ()))


@dataclass(slots=True, eq=False)
class _Taking:
    """Copies whose paths are being noted."""

    session: SessionKey
    sender: SessionKey
    portions: Iterator[tuple[SessionKey, Sums]]
    """Paths by the session that sent them."""


class Provenance:
    """Paths that sessions copied from, by session and sender, and copied positions by lineage.

    Args:
        max_paths: copied tokens noted.
        defers: True if :meth:`work` is called until all paths are noted; else they are at once.
    """

    def __init__(self, *, max_paths: int = MAX_PATHS, defers: bool = False) -> None:
        self._defers = defers
        self._takings: deque[_Taking] = deque()
        self.paths = Paths(token_bytes(SECRET_BYTES))
        """Paths as they are noted here."""
        self._max_paths = max_paths
        self._sent: OrderedDict[SessionKey, dict[SessionKey, Sums]] = OrderedDict()
        self._count = 0
        self._copied: OrderedDict[int, _Copied] = OrderedDict()
        self._copies = 0

    def note(
        self,
        session: SessionKey,
        lineage: int,
        sources: Sequence[SourceTurn],
        copies: Sequence[CopySegment],
        *,
        shared: bool = False,
    ) -> None:
        """Note the copies of a splice.

        Args:
            session: the session whose prompt they are for.
            lineage: their lineage, as radix keys carry it.
            sources: sources by the index that copies name.
            shared: True if other prompts have the same lineage.
        """
        ranges: _Ranges = {
            (copy.dest, copy.dest_end): np.zeros(copy.dest_end - copy.dest, dtype=np.uint64)
            for copy in copies
        }
        if len(ranges) <= MAX_RANGES:
            self._keep(lineage, ranges, shared=shared)
        for index in {copy.source for copy in copies}:
            taken = [copy for copy in copies if copy.source == index]
            sender = (sources[index].scope, sources[index].session)
            portions = self._portions(sender, sources[index], taken, session, ranges)
            self._takings.append(_Taking(session, sender, portions))
        if not self._defers:
            self._finish()

    def _keep(self, lineage: int, ranges: _Ranges, *, shared: bool) -> None:
        """Keep the origins of a lineage, and drop those of the oldest ones."""
        known = self._copied.pop(lineage, None)
        others = known.ranges if shared and known is not None else []
        noted = _Copied([ranges, *others[: MAX_PROMPTS - 1]], shared)
        self._copies += noted.length - (known.length if known is not None else 0)
        self._copied[lineage] = noted
        while len(self._copied) > MAX_LINEAGES or self._copies > self._max_paths:
            self._copies -= self._copied.popitem(last=False)[1].length

    def work(self) -> bool:
        """Note a portion of the paths that wait; returns False if none does."""
        while self._takings:
            taking = self._takings[0]
            portion = next(taking.portions, None)
            if portion is None:
                self._takings.popleft()
                continue
            self._add(taking.session, *portion)
            while self._count > self._max_paths:
                self._drop(next(iter(self._sent)))
            return True
        return False

    def _finish(self) -> None:
        while self.work():
            continue

    def _portions(
        self,
        sender: SessionKey,
        source: SourceTurn,
        taken: Sequence[CopySegment],
        session: SessionKey,
        origins: _Ranges,
    ) -> Iterator[tuple[SessionKey, Sums]]:
        """Yield the contents of copies, by the session that sent them, and fill in the origins."""
        state, last = self.paths.root(), max(copy.end for copy in taken)
        for start in range(0, last, _PORTION):
            tokens = source.tokens[start : min(last, start + _PORTION)]
            keys = fold_keys(tokens, source.lineage, source.scope, start=start)
            found = self._contents(keys, state)
            own = np.zeros(len(keys), dtype=np.bool_)
            for copy in taken:
                low, high = max(copy.start, start), min(copy.end, start + len(keys))
                if low < high:
                    ids = found.ids[low - start : high - start]
                    origins[copy.dest, copy.dest_end][low - copy.start : high - copy.start] = ids
                    own[low - start : high - start] = True
            yield sender, found.ids[own & ~found.copies]
        if last > source.exact_length and sender != session:
            # Copies of copies: their senders are the source's.
            for other, known in tuple(self._sent.get(sender, {}).items()):
                for start in range(0, len(known), _PORTION):
                    yield other, known[start : start + _PORTION]

    def contents(self, keys: array[int], state: PathState | None = None) -> Contents:
        """Return what the KV of keys is of, wherever it lies: the same for all copies of a row.

        Keys after a splice count without their lineage's name, but with what was copied in front
        of them: hidden text makes other content.

        Args:
            state: place on the path that the keys continue; it moves to the end.
        """
        self._finish()
        return self._contents(keys, self.paths.root() if state is None else state)

    def _contents(self, keys: array[int], state: PathState) -> Contents:
        start, view = state.position, np.frombuffer(keys or b"", dtype=np.int64).copy()
        copies, origins = np.zeros(len(view), dtype=np.bool_), np.zeros(len(view), dtype=np.uint64)
        others: dict[int, tuple[int, ...]] = {}
        lineages = view >> TOKEN_BITS
        for lineage in np.unique(lineages[lineages > 0]).tolist():
            noted = self._copied.get(lineage)
            if noted is None:
                continue  # its name keeps it apart from all others
            here = lineages == lineage
            if not noted.shared:
                view[here] &= MAX_TOKEN  # a copy in front of it keeps it apart from exact ones
            for (first, end), ids in (each for some in noted.ranges for each in some.items()):
                low, high = max(0, first - start), max(0, min(len(view), end - start))
                part = here[low:high].nonzero()[0] + low
                if not noted.shared:
                    copies[part], origins[part] = True, ids[part + start - first]
                    continue
                for at in part.tolist():
                    others[at] = (*others.get(at, ()), int(ids[at + start - first]))
        view[copies] = (origins[copies] >> np.uint64(2)).astype(np.int64) | _COPY
        heads = self.paths.heads(array("q", view.tobytes()), state)
        return Contents(np.where(copies, origins, heads), copies, others)

    def _add(self, session: SessionKey, sender: SessionKey, heads: Sums) -> None:
        if not len(heads):
            return
        by_sender = self._sent.setdefault(session, {})
        self._sent.move_to_end(session)
        known = by_sender.get(sender, np.empty(0, dtype=np.uint64))
        heads = np.unique(heads)
        at = np.searchsorted(known, heads)
        fresh = np.append(known, 0)[at] != heads
        fresh |= at == len(known)
        if fresh.any():
            by_sender[sender] = np.insert(known, at[fresh], heads[fresh])
            self._count += len(by_sender[sender]) - len(known)

    def _drop(self, session: SessionKey) -> None:
        gone = self._sent.pop(session, {})
        self._count -= sum(map(len, gone.values()))

    def forget(self, session: SessionKey) -> None:
        """Forget what a session copied, and what others copied of what it had sent."""
        if any(each.sender == session != each.session for each in self._takings):
            # What its copiers took of others' stays.
            self._finish()
        self._takings = deque(each for each in self._takings if each.session != session)
        self._drop(session)
        for by_sender in self._sent.values():
            self._count -= len(by_sender.pop(session, ()))

    def sent(self, owners: Collection[SessionKey | None], without: SessionKey) -> tuple[Sums, ...]:
        """Return the contents that sessions copied, of all senders but one; each sorted."""
        self._finish()
        found = [
            known
            for owner in owners
            if owner is not None
            for sender, known in self._sent.get(owner, {}).items()
            if sender != without
        ]
        return tuple(found)


class Sent:
    """Contents that sessions sent: those of retained turns, and those that were copied since.

    Args:
        contents: ids of exact paths.
        copied: see :meth:`Provenance.sent`.
    """

    def __init__(self, contents: Collection[int], copied: Sequence[Sums]) -> None:
        self._contents, self._copied = contents, copied

    def __contains__(self, content: object) -> bool:
        if not isinstance(content, int):
            return False
        wanted = np.uint64(content)
        return content in self._contents or any(_has(known, wanted) for known in self._copied)


def _has(known: Sums, wanted: np.uint64) -> bool:
    at = int(np.searchsorted(known, wanted))
    return at < len(known) and bool(known[at] == wanted)
