"""The costs of prefilling and splicing on the engine in use, from its turns."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from statistics import median

from leyline_engine.contract import Capability, Receipt
from leyline_policies import EditCost

from ..model.states import anchor_tokens, state_tokens

_SAMPLES = 64
_FEWEST_TOKENS = 64
"""Turns with fewer tokens are mostly overhead."""


class CostBook:
    """Medians over the last turns of one model.

    An engine's time to the first token is mostly prefill if there was much to prefill. The rest of
    it (queueing, the network, the first token itself) makes the estimate too high, especially for
    short prefills; a median ignores single slow turns. Engines that serve the same model at
    different speeds count as one.
    """

    def __init__(self) -> None:
        self._prefill: deque[float] = deque(maxlen=_SAMPLES)
        self._splice: deque[float] = deque(maxlen=_SAMPLES)

    def learn(self, receipt: Receipt, ttft_s: float | None, state_tokens: int = 0) -> None:
        """Record a turn.

        Args:
            state_tokens: tokens whose rows take as much memory as a state; a splice that kept
                states counts as having moved one.
            ttft_s: seconds from sending it to the first token of a streamed answer; None if
                unknown.
        """
        tokens = receipt.tokens
        if ttft_s is not None and tokens.prefilled >= _FEWEST_TOKENS:
            own = max(0.0, ttft_s * 1e6 - receipt.splice_us)
            self._prefill.append(own / tokens.prefilled)
        copied = tokens.spliced + tokens.reused + (state_tokens if receipt.state else 0)
        if receipt.splice_us and copied >= _FEWEST_TOKENS:
            self._splice.append(receipt.splice_us / copied)

    def cost(self, *, splices: bool) -> EditCost:
        """Return the medians; zeros until a turn yields a sample."""
        return EditCost(
            splices=splices,
            prefill_us=median(self._prefill) if self._prefill else 0.0,
            splice_us=median(self._splice) if self._splice else 0.0,
        )


class CostBooks:
    """The cost books of all models, by their metric label, of which there are few; and of each
    model's engines."""

    def __init__(self) -> None:
        self._books: defaultdict[str, CostBook] = defaultdict(CostBook)
        self._of_engines: defaultdict[tuple[str, str], CostBook] = defaultdict(CostBook)

    def cost(self, model: str, *, splices: bool, capability: Capability | None = None) -> EditCost:
        """Return a model's costs; those of an empty book until a turn gives some.

        Args:
            capability: the engine's, with the model's state.
        """
        known = (self._books.get(model) or CostBook()).cost(splices=splices)
        return replace(
            known, anchor_tokens=anchor_tokens(capability), state_tokens=state_tokens(capability)
        )

    def learn(
        self,
        model: str,
        engine: str,
        receipt: Receipt,
        ttft_s: float | None,
        capability: Capability | None = None,
    ) -> None:
        """Record the cost of a turn; see :meth:`CostBook.learn`."""
        for book in (self._books[model], self._of_engines[model, engine]):
            book.learn(receipt, ttft_s, state_tokens(capability))

    def prefill_us(self, model: str, engine: str) -> float | None:
        """Return one engine's microseconds per prefilled token; None until a turn gives some."""
        book = self._of_engines.get((model, engine))
        return (book.cost(splices=False).prefill_us if book is not None else 0.0) or None

    def avoided_s(self, model: str, receipt: Receipt) -> float:
        """Estimate the seconds saved: prefilling the copied tokens, less the copies. 0 until a
        turn gives a cost."""
        copied = receipt.tokens.spliced + receipt.tokens.reused
        book = self._books.get(model)
        if book is None or not copied:
            return 0.0
        prefill_us = book.cost(splices=True).prefill_us
        return max(0.0, copied * prefill_us - receipt.splice_us) / 1e6
