"""Origins of copied KV: who had sent what a splice copies, and which positions are copies.

Retained turns show what a session sent, but a session's oldest turns are dropped while copies of
their KV stay. Proofs of forgets need to know it. Bounded; digests under a secret of this process,
no tokens.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from secrets import token_bytes

import numpy as np
from numpy.typing import NDArray

from leyline_engine.contract import CopySegment
from leyline_engine.lineage import TOKEN_BITS, fold_keys, unnamed_keys
from leyline_engine.paths import SECRET_BYTES, Paths, Sums, head
from leyline_engine.sources import SessionKey, SourceTurn

MAX_PATHS = 1 << 21
"""Copied tokens noted, of eight bytes each; the least recently splicing sessions are dropped."""

MAX_LINEAGES = 1 << 13
"""Lineages whose copies are noted; more than a ledger knows."""

MAX_RANGES = 256
"""Ranges noted per lineage; what was copied to others counts as computed."""

_PORTION = 1 << 12
"""Tokens whose paths are noted at once, in a millisecond or less."""


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
        self._copied: OrderedDict[int, dict[tuple[int, int], None]] = OrderedDict()

    def note(
        self,
        session: SessionKey,
        lineage: int,
        sources: Sequence[SourceTurn],
        copies: Sequence[CopySegment],
    ) -> None:
        """Note the copies of a splice.

        Args:
            session: the session whose prompt they are for.
            lineage: their lineage, as radix keys carry it.
            sources: sources by the index that copies name.
        """
        ranges = self._copied.setdefault(lineage, {})
        self._copied.move_to_end(lineage)
        for copy in copies[: max(0, MAX_RANGES - len(ranges))]:
            ranges[copy.dest, copy.dest_end] = None
        while len(self._copied) > MAX_LINEAGES:
            self._copied.popitem(last=False)
        for index in {copy.source for copy in copies}:
            taken = [copy for copy in copies if copy.source == index]
            sender = (sources[index].scope, sources[index].session)
            portions = self._portions(sender, sources[index], taken, session)
            self._takings.append(_Taking(session, sender, portions))
        if not self._defers:
            self._finish()

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
    ) -> Iterator[tuple[SessionKey, Sums]]:
        """Yield the paths of copies, by the session that sent them."""
        state, last = self.paths.root(), max(copy.end for copy in taken)
        for start in range(0, last, _PORTION):
            tokens = source.tokens[start : min(last, start + _PORTION)]
            keys = fold_keys(tokens, source.lineage, source.scope, start=start)
            heads = self.paths.heads(unnamed_keys(keys), state)
            yield sender, heads[self._own(keys, start, taken)]
        if last > source.exact_length and sender != session:
            # Copies of copies: their senders are the source's.
            for other, known in tuple(self._sent.get(sender, {}).items()):
                for start in range(0, len(known), _PORTION):
                    yield other, known[start : start + _PORTION]

    def _own(self, keys: array[int], start: int, taken: Sequence[CopySegment]) -> NDArray[np.bool_]:
        """Return ``[len(keys)]``, True for what copies take that is no copy itself.

        Args:
            start: position of the first key.
        """
        found = np.zeros(len(keys), dtype=np.bool_)
        for copy in taken:
            found[max(0, copy.start - start) : max(0, copy.end - start)] = True
        lineages = np.frombuffer(keys, dtype=np.int64) >> TOKEN_BITS
        for lineage in np.unique(lineages).tolist():
            for first, end in self._copied.get(lineage, ()):
                copied = slice(max(0, first - start), max(0, end - start))
                found[copied] &= lineages[copied] != lineage
        return found

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
        """Return the paths that sessions copied from, of all senders but one; each sorted."""
        self._finish()
        found = [
            known
            for owner in owners
            if owner is not None
            for sender, known in self._sent.get(owner, {}).items()
            if sender != without
        ]
        return tuple(found)

    def is_copy(self, lineage: int, position: int) -> bool:
        """Return True if a splice copied to a position under a lineage."""
        return any(start <= position < end for start, end in self._copied.get(lineage, ()))


class Sent:
    """Paths that sessions sent: those of retained turns, and those that were copied since.

    Args:
        paths: exact paths.
        copied: see :meth:`Provenance.sent`.
    """

    def __init__(self, paths: Collection[bytes], copied: Sequence[Sums]) -> None:
        self._paths, self._copied = paths, copied

    def __contains__(self, path: object) -> bool:
        if not isinstance(path, bytes):
            return False
        wanted = np.uint64(head(path))
        return path in self._paths or any(_has(known, wanted) for known in self._copied)


def _has(known: Sums, wanted: np.uint64) -> bool:
    at = int(np.searchsorted(known, wanted))
    return at < len(known) and bool(known[at] == wanted)
