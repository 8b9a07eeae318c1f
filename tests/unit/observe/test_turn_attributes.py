"""Attributes of a turn's span."""

from __future__ import annotations

from leyline_engine.contract import Outcome, Receipt, TokenCounts
from leyline_proxy.observe.turn_traces import of_receipt


def test_tokens_that_nobody_counted_are_no_zeros() -> None:
    """A stream without usage has an outcome, and no tokens."""
    counted = Receipt(
        message_id="m",
        outcome=Outcome.SPLICED,
        tokens=TokenCounts(prompt=9, prefix=4, prefilled=5),
    )
    assert of_receipt(counted, None)["gen_ai.usage.input_tokens"] == 9
    unknown = of_receipt(Receipt(message_id="m", outcome=Outcome.REPREFILLED), 0.5)
    assert unknown.keys() == {"leyline.outcome", "gen_ai.response.time_to_first_chunk"}
