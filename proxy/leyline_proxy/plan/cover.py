"""One cover of a prompt from the kept tokens of several sources.

::

    prompt    0 ───────────────────────────────────────────── n
    newest    ═══════════════╗      ══════
    a branch  ════════       ╚══════════════════╗
    cover     newest ────────│ a branch ────────│ prefilled ──

If several sources have a token, the one in use continues as long as it can: each change of source
is another copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .token_diff import Kept

MIN_SWITCH = 32
"""Fewer tokens aren't worth another source."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens copied from source ``source``."""

    source: int
    run: Kept


class _Runs:
    """One source's kept runs by destination; disjoint and sorted."""

    def __init__(self, runs: Sequence[Kept]) -> None:
        self._runs = runs
        self._starts = [run.dest for run in runs]

    def at(self, position: int) -> Kept | None:
        """Return the source's run from ``position`` on, if it has the token there."""
        index = bisect_right(self._starts, position) - 1
        run = self._runs[index] if index >= 0 else None
        return _cut(run, position, run.dest_end) if run and run.dest_end > position else None

    def next_start(self, position: int) -> int | None:
        """Return the start of the next run after ``position``."""
        index = bisect_right(self._starts, position)
        return self._starts[index] if index < len(self._starts) else None


def cover(sources: Sequence[Sequence[Kept]], preferred: int) -> tuple[Piece, ...]:
    """Cover as much of a prompt as the sources together have, with few changes of source.

    Args:
        sources: for each source its usable runs, sorted by destination and disjoint.
        preferred: used alone unless others have :data:`MIN_SWITCH` tokens more.

    Returns:
        Pieces by destination, disjoint. They hold every token that ``preferred`` has, and from
        others no stretch shorter than :data:`MIN_SWITCH`.
    """
    pieces = tuple(_joined(_sweep([_Runs(kept) for kept in sources], preferred)))
    gained = sum(p.run.length for p in pieces) - sum(run.length for run in sources[preferred])
    if gained < MIN_SWITCH:
        return tuple(Piece(preferred, run) for run in sources[preferred])
    return pieces


def _sweep(sources: Sequence[_Runs], preferred: int) -> Iterator[Piece]:
    """Go from left to right: use the current source while possible, else the preferred, else the
    furthest.

    The first piece is from the source that reaches furthest, because a prefix is found without a
    copy.
    """
    position = 0
    used = preferred
    while True:
        here = {
            index: run
            for index, runs in enumerate(sources)
            if (run := runs.at(position)) is not None
            and (index in (used, preferred) or run.length >= MIN_SWITCH)
        }
        if here:
            if position == 0 or not {used, preferred} & here.keys():
                used = max(here, key=lambda index: (here[index].dest_end, index == preferred))
            elif used not in here:
                used = preferred
            yield Piece(used, here[used])
            position = here[used].dest_end
            continue
        ahead = [start for runs in sources if (start := runs.next_start(position)) is not None]
        if not ahead:
            return
        position = min(ahead)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours that continue each other in the same source."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.source == piece.source
            and (last.run.end, last.run.dest_end) == (piece.run.start, piece.run.dest)
        ):
            joined[-1] = Piece(last.source, Kept(last.run.start, piece.run.end, last.run.dest))
        else:
            joined.append(piece)
    return joined


def _cut(run: Kept, dest: int, dest_end: int) -> Kept:
    start = run.start + dest - run.dest
    return Kept(start, start + dest_end - dest, dest)
