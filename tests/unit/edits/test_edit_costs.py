"""The cost of prefill, measured on the engine in use."""

from __future__ import annotations

import msgspec
from support.fake_engine import CAPABILITY

from leyline_engine.contract import KVFacts, Receipt, StateFacts, TokenCounts
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


def test_a_kept_state_counts_as_the_rows_that_take_its_memory() -> None:
    """The price of a row doesn't have that of the state beside it, and the policies get both."""
    kv = KVFacts(pool_class="gqa", dtype="f", layers=1, bytes_per_token=10, capacity_tokens=9)
    state = StateFacts(recurrent_layers=1, bytes_per_state=8_995, anchor_tokens=64)
    hybrid = msgspec.structs.replace(CAPABILITY, kv=kv, state=state)
    books, tokens = CostBooks(), TokenCounts(200, spliced=100, prefilled=100)
    for kept, engine in (("kept", "a"), ("", "b")):
        told = Receipt(message_id="m", tokens=tokens, splice_us=1000, state=kept)
        books.learn(engine, engine, told, None, hybrid)
    found = [books.cost(model, splices=True, capability=hybrid) for model in ("a", "b")]
    assert [cost.splice_us for cost in found] == [1.0, 10.0]
    assert {(cost.anchor_tokens, cost.state_tokens) for cost in found} == {(64, 900)}
    bare = books.cost("a", splices=True)
    assert (bare.anchor_tokens, bare.state_tokens) == (1, 0)
