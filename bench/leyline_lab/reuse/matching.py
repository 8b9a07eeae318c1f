"""The CPU time that content reuse costs an engine per turn: the search, and the index's update.

A session grows by NEW tokens per turn. Half of them are new, the others are quoted from its
beginning. The rest of the prompt is a cached prefix, as in an engine. Other sessions of the tenant
fill the index beside it.
"""

from __future__ import annotations

from array import array
from statistics import median
from time import perf_counter

import numpy as np

from leyline_engine.contract import ATTENTION_SINK, token_digest
from leyline_engine.records.sources import SourceTurn
from leyline_engine.reuse.fingerprints import Fingerprinter, MatcherKind, fingerprinter
from leyline_engine.reuse.index import ReuseIndex
from leyline_engine.reuse.matching import ReuseMatcher

from ..console import write_json
from ..harness.arguments import Arguments, numbers
from ..harness.report import show
from .index import VOCABULARY

OTHERS = 4
"""Sessions of the same length beside the measured one."""


class Session:
    """One session's tokens and slots, as it grows."""

    def __init__(self, name: str, length: int, first_slot: int, seed: int) -> None:
        self.name = name
        self._rng = np.random.default_rng(seed)
        self._first_slot = first_slot
        self.ids = self._rng.integers(0, VOCABULARY, length)

    def grow(self, count: int) -> None:
        """Add a turn: half of it new, half of it quoted."""
        start = int(self._rng.integers(ATTENTION_SINK, len(self.ids) // 2))
        fresh = self._rng.integers(0, VOCABULARY, count - count // 2)
        self.ids = np.concatenate([self.ids, fresh, self.ids[start : start + count // 2]])

    def turn(self, number: int) -> SourceTurn:
        """Return the session's tokens as a retained turn."""
        tokens = array("q", self.ids.tolist())
        return SourceTurn(f"t{number}", tokens, token_digest(tokens), (), "tenant", self.name)

    def slots(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the slots of its tokens."""
        return np.arange(self._first_slot, self._first_slot + len(self.ids))


def measure(prints: Fingerprinter, length: int, new: int, repeat: int) -> dict[str, float]:
    """Return medians in milliseconds for prompts of ``length`` tokens, ``new`` of them uncached."""
    room = length + (repeat + 1) * new
    sessions = [Session(f"s{n}", length - new, n * room, n) for n in range(OTHERS + 1)]
    index = ReuseIndex(prints, len(sessions) * room)
    matcher = ReuseMatcher(index, prints, sink=ATTENTION_SINK)
    for each in sessions:
        index.add(each.turn(0), each.slots())
    own, searches, updates, found = sessions[0], [], [], []
    for number in range(1, repeat + 1):
        before = len(own.ids)
        own.grow(new)
        turn = own.turn(number)
        began = perf_counter()
        hits = matcher.find(
            turn.tokens, [(before, len(own.ids))], ("tenant", own.name), lambda s: len(s.tokens)
        )
        searched = perf_counter()
        index.add(turn, own.slots())
        updates.append(perf_counter() - searched)
        searches.append(searched - began)
        found.append(hits.tokens)
    return {
        "search_ms": round(1e3 * median(searches), 3),
        "update_ms": round(1e3 * median(updates), 3),
        "found": round(median(found) / new, 3),
    }


def main() -> None:
    """Measure each matcher and size, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--sizes", type=numbers, default="10000,50000,100000", help="in tokens")
    parser.add_argument("--new", type=int, default=1000, help="uncached tokens of each prompt")
    parser.add_argument("--repeat", type=int, default=15)
    given = parser.parse_args()
    found = {
        kind.value: {
            size: measure(fingerprinter(kind, 1), size, given.new, given.repeat)
            for size in given.sizes
        }
        for kind in (MatcherKind.WINNOW, MatcherKind.CDC)
    }
    rows = [
        (
            *(kind, f"{size:,}"),
            *(f"{row[name]:.2f} ms" for name in ("search_ms", "update_ms")),
            f"{row['found']:.1%}",
        )
        for kind, by_size in found.items()
        for size, row in by_size.items()
    ]
    show(("matcher", "prompt", "search", "update", "found of the new"), rows)
    write_json(given.json, found)
