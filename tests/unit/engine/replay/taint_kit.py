"""Readers of a secret token, followed slot by slot beside the engine.

A flag per slot says whether its KV was computed with the secret token in view. Prefill spreads the
flag along a sequence, a copy carries it over, an erase clears it. A slot that is free keeps it.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from leyline_replay.engine import ReplayEngine
from leyline_replay.sequence import Forward, Sequence


class Taint:
    """Flags of an engine's slots."""

    def __init__(self, engine: ReplayEngine, secret: int) -> None:
        pool = engine.cache.pool
        self.flags = np.zeros(engine.cache.capacity, dtype=bool)
        self._secret = secret
        copy, erase = pool.copy, pool.erase

        def copying(source: Any, target: Any, begin: int) -> None:
            copy(source, target, begin)
            self.flags[target] = self.flags[source]

        def erasing(slots: Any) -> None:
            erase(slots)
            self.flags[slots] = False

        pool.copy, pool.erase = copying, erasing  # type: ignore[assignment,method-assign]

    def follow(self, sequence: Sequence) -> Sequence:
        """Have a request's forwards spread the flags."""
        forward = sequence.forward

        def tracking(fed: list[int], begin: int, cache: Any) -> Any:
            seen = bool(self.flags[sequence.held[:begin]].any())
            for offset, token in enumerate(fed):
                seen = seen or token == self._secret
                self.flags[sequence.held[begin + offset]] = seen
            return forward(fed, begin, cache)

        sequence.forward = cast(Forward, tracking)
        return sequence
