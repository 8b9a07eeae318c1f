"""When edits wait, and when they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.contract import Mode, Receipt, TokenCounts
from leyline_policies import EditCost, Policy, load_pipeline
from leyline_proxy.edits.costs import CostBook
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.edits.schedule import Balance, Timing, balance, pays, pending, schedule
from leyline_proxy.model.messages import Message, text_of
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.vocabulary import Decision
from leyline_proxy.request.declared import DeclaredEdit

PLAIN = EditCost(splices=False, prefill_us=10.0)
SPLICING = EditCost(splices=True, prefill_us=10.0, splice_us=0.1)
CUT = load_pipeline("truncate_older_than:n=1,max_chars=40")
REDACT = load_pipeline("redact:pattern=hunter2")
SYSTEM: Message = {"role": "system", "content": "be brief"}


def talk(sizes: Sequence[int]) -> list[Message]:
    """A task and one tool result of each size."""
    messages = [SYSTEM, {"role": "user", "content": "a task"}]
    for number, size in enumerate(sizes):
        function = {"name": "read", "arguments": "{}"}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        text = f"{number} " * size
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": text})
    return messages


def chars(message: Message) -> int:
    """A token per character."""
    return len(text_of(message))


def turns(
    lists: Sequence[list[Message]], policies: Sequence[Policy], timing: Timing, window: int | None
) -> list[Prepared]:
    """The messages sent on each turn."""
    sent: list[Prepared] = []
    for index, messages in enumerate(lists):
        now = prepare(messages, policies, (), index)
        if sent:
            now, _ = schedule(
                sent[-1], now, PLAIN, timing, tokens=chars, turns=index, window=window
            )
        sent.append(now)
    return sent


SIZES = st.lists(st.integers(1, 300), min_size=2, max_size=8)


@given(SIZES, st.floats(0, 2), st.floats(0, 2), st.sampled_from([None, 500, 5_000]))
def test_a_turn_is_sent_as_edited_or_grows_from_the_turn_before(
    sizes: list[int], carry: float, need: float, window: int | None
) -> None:
    """Nothing in between: what was cached stays a prefix, or all edits are made."""
    lists = [talk(sizes[: count + 1]) for count in range(len(sizes))]
    sent = turns(lists, CUT, Timing(carry=carry, need=need), window)
    for index in range(1, len(lists)):
        before, now = sent[index - 1].messages, sent[index].messages
        edited = prepare(lists[index], CUT, (), index).messages
        grows = now[: len(before)] == before
        assert now == edited or grows
        assert bool(sent[index].notes) == (now != edited)
        assert len(now) == len(edited)
        if window is not None and sum(map(chars, now)) > 0.8 * window:
            assert now == edited


def test_what_is_to_be_forgotten_never_waits() -> None:
    """A secret in an old message is gone on the turn that finds it, and the rest with it."""
    first = talk([50, 50])
    before = prepare(first, CUT, (), 0)
    secret = [*first, {"role": "user", "content": "my password is hunter2"}]
    now = prepare(secret, (*CUT, *REDACT), (), 1)
    held, decision = schedule(before, now, PLAIN, Timing(0, 0), tokens=chars, turns=1, window=None)
    assert decision is Decision.NOTHING
    assert "hunter2" not in str(held.messages)
    old = prepare(secret, CUT, (), 1)
    later = prepare([*secret, {"role": "user", "content": "go on"}], (*CUT, *REDACT), (), 2)
    assert pending(old, later) is None


def test_what_the_caller_declares_never_waits() -> None:
    """It said so for this turn."""
    before = prepare(talk([80]), (), (), 0)
    declared = [DeclaredEdit(message=3, mode=Mode.AMORTIZE, replacement="cut")]
    assert pending(before, prepare(talk([80, 5]), CUT, declared, 1)) is None
    assert pending(before, prepare(talk([80, 5]), CUT, (), 1)) is not None


def test_a_history_that_the_caller_changed_is_edited_at_once() -> None:
    """Its cache is lost already."""
    before = prepare(talk([80, 80]), (), (), 0)
    changed = talk([80, 80, 5])
    changed[1] = {"role": "user", "content": "another task"}
    assert pending(before, prepare(changed, CUT, (), 1)) is None


def test_the_balance_counts_what_is_behind_the_first_edit() -> None:
    """The prompt is shorter by what goes, costlier by what stays after it; this turn's messages
    count in neither."""
    before = prepare(talk([100, 50]), (), (), 0)
    now = prepare(talk([100, 50, 70]), CUT, (), 1)
    held = pending(before, now)
    assert held is not None
    found = balance(held, now, len(before.sent), chars)
    stubs = [chars(now.messages[3]), chars(now.messages[5])]
    assert found.inserted == sum(stubs)
    assert found.recomputed == sum(stubs)
    assert found.prompt == sum(map(chars, held.messages))
    assert found.reclaimed == found.prompt - sum(map(chars, now.messages))


CASE = Balance(reclaimed=1_000, recomputed=5_000, inserted=100, prompt=20_000)


@pytest.mark.parametrize(
    ("cost", "timing", "turn", "window", "expected"),
    [
        (PLAIN, Timing(carry=0, need=0), 50, 100_000, False),
        (PLAIN, Timing(carry=0.1, need=0), 49, None, False),
        (PLAIN, Timing(carry=0.1, need=0), 50, None, True),
        (PLAIN, Timing(carry=0.1, need=0, longest_turns=20), 50, None, False),
        (PLAIN, Timing(carry=0, need=5, pressure=1), 1, 21_000, False),
        (PLAIN, Timing(carry=0, need=5.3, pressure=1), 1, 21_000, True),
        (PLAIN, Timing(carry=0, need=0), 1, 24_000, True),
        (SPLICING, Timing(carry=0.1, need=0), 1, None, False),
        (SPLICING, Timing(carry=0.1, need=0), 2, None, True),
        (SPLICING, Timing(carry=0, need=0, splicing_waits=False), 0, None, True),
        (EditCost(splices=True), Timing(carry=0.1, need=0), 1, None, True),
    ],
)
def test_edits_are_sent_when_they_pay(
    cost: EditCost, timing: Timing, turn: int, window: int | None, expected: bool
) -> None:
    """Cost against worth, at each side of the line."""
    assert pays(CASE, cost, timing, turns=turn, window=window) is expected


def test_anchors_and_states_are_part_of_the_price() -> None:
    """Each place with new text costs the tokens between two anchors, each moved run a state at the
    price of its rows; dropped messages leave no such place, and a prefill bounds it all."""
    whole = talk([500, 900, 700, 20])
    lists = [whole[:-2], whole]
    (held,) = turns(lists[:1], (), Timing(), None)

    def found(policy: str) -> Balance:
        now = prepare(lists[1], load_pipeline(policy), (), 1)
        waits = pending(held, now)
        assert waits is not None
        return balance(waits, now, len(held.sent), chars)

    stubs = found("truncate_older_than:n=1,max_chars=40")
    assert (stubs.gaps, found("sliding_window:max_messages=6").gaps) == (2, 0)
    hybrid = replace(SPLICING, anchor_tokens=65, state_tokens=1_000)
    price = CASE.inserted + (4_900 + 1_000) * 0.01
    for gaps, states in ((0, 0), (3, 3 * 64 + 2_000 * 0.01)):
        line = (price + states) / CASE.reclaimed
        case = replace(CASE, gaps=gaps)
        for carry, expected in ((line * 1.001, True), (line * 0.999, False)):
            timing = Timing(carry=carry, need=0)
            assert pays(case, hybrid, timing, turns=1, window=None) is expected
    large = replace(hybrid, state_tokens=10**9)
    assert pays(CASE, large, Timing(carry=5.01, need=0), turns=1, window=None)
    assert hybrid.of(500) == 1_500 * 0.1 + 64 * 10


def test_edits_that_reclaim_nothing_are_not_held() -> None:
    """It isn't for their tokens that they are made."""
    timing = Timing(carry=0, need=0)
    for reclaimed, expected in ((-5, True), (0, True), (1, False)):
        case = replace(CASE, reclaimed=reclaimed)
        assert pays(case, PLAIN, timing, turns=1, window=None) is expected


@given(st.integers(1, 10_000), st.integers(0, 10_000), st.integers(1, 300), st.integers(1, 50_000))
def test_more_reclaimed_never_makes_an_edit_wait(
    reclaimed: int, more: int, turn: int, window: int
) -> None:
    """Nor does a session that has lasted longer; a single token is held where the window is far
    from full, and what reclaims enough is sent."""
    for cost in (PLAIN, SPLICING):

        def sent(tokens: int, turns: int = turn, cost: EditCost = cost) -> bool:
            found = replace(CASE, reclaimed=tokens)
            return pays(found, cost, Timing(), turns=turns, window=window)

        fills = CASE.prompt > Timing().pressure * window
        assert sent(1, turns=1) is fills
        assert sent(10**9)
        assert sent(reclaimed) <= sent(reclaimed + more)
        assert sent(reclaimed) <= sent(reclaimed, turns=turn + 10)


def test_costs_are_medians_of_what_turns_told() -> None:
    """One slow turn changes little; short turns and answers in one piece show nothing."""
    book = CostBook()
    assert book.cost(splices=True) == EditCost(splices=True)
    for ttft_s in (0.1, 0.1, 9.0):
        tokens = TokenCounts(prompt=2_000, spliced=1_000, prefilled=1_000)
        book.learn(Receipt(message_id="m", tokens=tokens, splice_us=500), ttft_s)
    book.learn(Receipt(message_id="m", tokens=TokenCounts(prompt=5, prefilled=5)), 3.0)
    book.learn(Receipt(message_id="m", tokens=TokenCounts(prompt=900, prefilled=900)), None)
    found = book.cost(splices=True)
    assert (found.prefill_us, found.splice_us) == pytest.approx((99.5, 0.5))
    assert found.of(1_000) == pytest.approx(500)
    assert book.cost(splices=False).of(1_000) == pytest.approx(99_500)
