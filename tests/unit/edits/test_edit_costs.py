"""The cost of prefill, measured on the engine in use."""

from __future__ import annotations

from leyline_engine.contract import Receipt, TokenCounts
from leyline_proxy.edits.costs import CostBooks


def receipt(prefilled: int) -> Receipt:
    """The receipt of a turn that was prefilled alone."""
    return Receipt(message_id="m", tokens=TokenCounts(prefilled, prefilled=prefilled))


def test_each_engine_has_its_own_speed() -> None:
    """A slow engine says nothing of a fast one of the same model, and neither does a turn that
    wasn't streamed or hardly prefilled."""
    books = CostBooks()
    books.learn("m", "fast", receipt(1000), 0.1)
    books.learn("m", "slow", receipt(1000), 1.0)
    books.learn("m", "unknown", receipt(1000), None)
    books.learn("m", "short", receipt(8), 1.0)
    assert books.prefill_us("m", "fast") == 100.0
    assert books.prefill_us("m", "slow") == 1000.0
    assert books.cost("m", splices=True).prefill_us == 550.0
    assert books.prefill_us("m", "unknown") is books.prefill_us("m", "short") is None
    assert books.prefill_us("other", "fast") is None
