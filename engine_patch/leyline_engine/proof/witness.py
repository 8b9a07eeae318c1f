"""The witness of forgets, which a cache calls around them. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from leyline_engine.contract import ForgetCounts
from leyline_engine.records.ledger import SpanKey
from leyline_engine.records.sources import SessionKey

Slots = NDArray[np.int64]


class ForgetWitness:
    """Ignores all calls; a subclass overrides them. Called on the engine's thread."""

    def forgetting(
        self,
        ticket: str,
        session: SessionKey,
        spans: frozenset[SpanKey] | None,
        spared: Sequence[array[int]],
    ) -> None:
        """Note that a forget begins; nothing is changed yet.

        Args:
            spans: the spans; None for all KV of the session.
            spared: keys that the request that forgets may use.
        """

    def forgot(self, ticket: str, counts: ForgetCounts) -> None:
        """Note that a forget has been carried out, as far as it can be now."""

    def overwriting(
        self, tickets: Collection[str], slots: Slots, keys: array[int], start: int
    ) -> None:
        """Note that slots that a request computed are about to be overwritten for forgets.

        Args:
            tickets: forgets that waited for them.
            keys: keys of the request's tokens; those from ``start`` on have the slots.
        """

    def overwritten(self, slots: Slots) -> None:
        """Note that slots have been overwritten, for whichever forget."""
