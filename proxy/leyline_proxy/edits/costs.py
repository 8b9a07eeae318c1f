"""What prefilling and splicing cost on the engine in use, as its turns told."""

from __future__ import annotations

from collections import deque
from statistics import median

from leyline_engine.contract import Receipt
from leyline_policies import EditCost

_SAMPLES = 64
_FEWEST_TOKENS = 64
"""Turns with less are mostly overhead."""


class CostBook:
    """Medians over the last turns of one model.

    The time that an engine takes to the first token is mostly prefill where there was much to
    prefill. What else is in it (its own queue, the network, the first token itself) makes the
    estimate too high, the more so the less there was to prefill; a median passes over single slow
    turns. Engines that serve the same model at different speeds are one here.
    """

    def __init__(self) -> None:
        self._prefill: deque[float] = deque(maxlen=_SAMPLES)
        self._splice: deque[float] = deque(maxlen=_SAMPLES)

    def learn(self, receipt: Receipt, ttft_s: float | None) -> None:
        """Take in a turn.

        Args:
            ttft_s: seconds from sending it to the first token of a streamed answer; None where
                unknown.
        """
        tokens = receipt.tokens
        if ttft_s is not None and tokens.prefilled >= _FEWEST_TOKENS:
            own = max(0.0, ttft_s * 1e6 - receipt.splice_us)
            self._prefill.append(own / tokens.prefilled)
        if receipt.splice_us and tokens.spliced >= _FEWEST_TOKENS:
            self._splice.append(receipt.splice_us / tokens.spliced)

    def cost(self, *, splices: bool) -> EditCost:
        """The medians; zeros until the first turn that tells."""
        return EditCost(
            splices=splices,
            prefill_us=median(self._prefill) if self._prefill else 0.0,
            splice_us=median(self._splice) if self._splice else 0.0,
        )
