"""The place of a claim's tokens in a cache of whole prefixes. Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from leyline_engine.contract import Predicate, common_prefix
from leyline_engine.records.sources import SessionKey, SourceTurn


@dataclass(frozen=True, slots=True)
class ClaimPlace:
    """Tokens ``[start, end)`` of a turn, and the pages that hold them.

    ::

        path  │  page 0  │  page 1  │  page 2  │  page 3  │ (a partial page isn't cached)
                          start ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ end
              └──── keys ──────────────────────┘
              └─ before ─┘└───── the claim's ──┘
    """

    keys: array[int]
    """Radix keys from the root to the end of the claim's last page."""
    start: int
    end: int
    """At most the number of keys."""
    before: int
    """Pages before the claim's own."""
    turn: SourceTurn
    """The turn that was claimed, for caches that find its KV by more than its keys."""

    @property
    def session(self) -> SessionKey:
        return self.turn.scope, self.turn.session

    @property
    def exact(self) -> int:
        """Number of the turn's tokens under plain keys."""
        return self.turn.exact_length

    @classmethod
    def of(cls, turn: SourceTurn, start: int, end: int, page: int) -> ClaimPlace:
        """Return the place of a turn's tokens.

        Args:
            page: tokens per page.
        """
        span = Predicate(turn.turn, start, end)
        first, last = span.page_span(page, length_with_kv(turn))
        keys = turn.keys()[: last * page]
        return cls(keys, start, min(end, len(keys)), first, turn)

    def covered_by(self, keys: array[int], length: int) -> bool:
        """Return True if the first ``length`` of ``keys`` have all of its pages."""
        size = len(self.keys)
        return size <= length and common_prefix(self.keys, keys) == size


def length_with_kv(turn: SourceTurn) -> int:
    """Return the number of a turn's tokens that have KV: the last was sampled, never fed back."""
    return len(turn.tokens) - 1
