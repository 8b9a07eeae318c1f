"""The reasons for a turn's prefilled tokens: each names a changed message or a cause."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.sessions import RULES, history, pipeline, render, sessions

from leyline_engine.contract import CopySegment, Outcome, Reason, Receipt, TokenCounts
from leyline_proxy.edits.prepare import prepare
from leyline_proxy.model.messages import fingerprint
from leyline_proxy.model.paid import MAX_BUSTS, OTHERS, Bust, Origin, Paid, Price, largest
from leyline_proxy.model.paid import paid_account as account_of
from leyline_proxy.model.prepared import Prepared
from leyline_proxy.model.rendered import MessageSpan, Rendered
from leyline_proxy.model.session import Session
from leyline_proxy.model.undeclared import UndeclaredRules
from leyline_proxy.model.vocabulary import CAUSES, PAGE_CAUSE
from leyline_proxy.plan.busts import CacheAccount, Loss, settle
from leyline_proxy.plan.naming import name_spans
from leyline_proxy.plan.reach import Cut, Reach, Stretch, cause_label
from leyline_proxy.plan.synthesis import TurnPlan, synthesize
from leyline_proxy.turns.settler import paid_for
from leyline_proxy.turns.turn import Turn

SPECS = ["keep_all", "truncate_older_than:n=1,max_chars=20", "redact:pattern='sk-[a-z0-9]+'"]
PRICE = Price("EUR", prefilled=2.0, cached=0.5, generated=10.0)


def turn_of(plan: TurnPlan, prepared: Prepared, rendered: Rendered | None) -> Turn:
    """A turn, as far as its account reads it."""
    planned = SimpleNamespace(plan=plan, prepared=prepared, rendered=rendered)
    return cast("Turn", SimpleNamespace(planned=planned))


def paid_by(turn: Turn, cache: CacheAccount, counts: TokenCounts, **facts: Any) -> Paid | None:
    """The reasons for a turn's prefilled tokens."""
    receipt = Receipt(message_id="m", tokens=counts, **facts)
    return paid_for(turn, receipt, cache, prefill_us=None, price=None, generated=None)


@st.composite
def next_turns(draw: st.DrawFn) -> tuple[Session, Turn, int]:
    """A session's next turn, whose list the caller and policies may have edited, and its length."""
    session = draw(sessions(SPECS))
    messages = list(session.turns[-1].prepared.client) if session.turns else history(2)
    for place in draw(st.sets(st.integers(0, len(messages) - 1), max_size=3)):
        messages[place] = {**messages[place], "content": f"something else, said at {place}"}
    messages.append({"role": "user", "content": "Go on."})
    spec = draw(st.sampled_from(SPECS))
    prepared = prepare(messages, pipeline(spec), (), session.next_index)
    rendered = render(prepared.messages)
    names = name_spans("next", prepared, session.turns, session.departed, rendered)
    rules = draw(st.sampled_from([RULES, UndeclaredRules()]))
    plan = synthesize(
        session.turns, prepared, rendered, rules, names=names, model_fingerprint="m", sink=0
    )
    return session, turn_of(plan, prepared, rendered), len(rendered.tokens)


@settings(max_examples=examples(60))
@given(next_turns(), st.data())
def test_each_lost_token_has_a_changed_message_or_a_cause(
    given_turn: tuple[Session, Turn, int], data: st.DataObject
) -> None:
    """For any engine, entries add up to the lost tokens, lost and new ones to the
    prefilled ones, and an edit that is to blame is of a message that isn't as it was in the turn
    that the prompt was compared with."""
    session, turn, prompt = given_turn
    plan, prepared = turn.planned.plan, turn.planned.prepared
    copies = [(s.dest, s.dest_end) for s in plan.segments if isinstance(s, CopySegment)]
    prefix = data.draw(st.integers(0, prompt))
    most = sum(max(0, end - max(start, prefix)) for start, end in copies)
    spliced = data.draw(st.sampled_from([0, most]))
    reused = data.draw(st.integers(0, prompt - prefix - spliced))
    counts = TokenCounts(prompt, prefix, spliced, reused, prompt - prefix - spliced - reused)
    page = data.draw(st.sampled_from([None, 1, 16]))
    cache = settle(plan.reach, counts, copies=copies, page=page)
    paid = paid_by(turn, cache, counts)
    assert paid is not None
    assert paid.lost + paid.new == counts.prefilled and min(paid.lost, paid.new) >= 0
    assert paid.cached == counts.served
    assert sum(bust.tokens for bust in paid.busts) == paid.lost
    compared = [each for each in session.turns if each.turn == plan.reach.turn]
    held = {value for each in compared for value in each.prepared.client_fingerprints}
    edited = {each.client_index for each in prepared.sent if each.changes}
    edited |= {item.client_index for item in prepared.dropped}
    revoked = any(each.changes for old in session.turns for each in old.prepared.sent)
    for bust in paid.busts:
        assert bust.tokens > 0
        assert cause_label(bust.origin.cause) in {*CAUSES, PAGE_CAUSE, OTHERS}
        message = bust.origin.message
        if message is not None:
            as_it_was = fingerprint(prepared.client[message]) in held
            assert not as_it_was or message in edited or revoked
        if bust.messages is not None:
            assert 0 <= bust.messages[0] <= bust.messages[1] < len(prepared.client)


@settings(max_examples=examples(60))
@given(next_turns())
def test_an_engine_without_anything_has_lost_all_in_reach(
    given_turn: tuple[Session, Turn, int],
) -> None:
    """Every token that the retained turn had is lost to something, but for the prompt's last."""
    _, turn, prompt = given_turn
    reach = turn.planned.plan.reach
    counts = TokenCounts(prompt, prefilled=prompt)
    paid = paid_by(turn, settle(reach, counts, page=1), counts)
    within = sum(min(s.end, prompt - 1) - min(s.start, prompt - 1) for s in reach.stretches)
    assert paid is not None and paid.lost == within


CUTS = (
    Cut(100, "policy:cut", "amortize", "tool", 1),
    Cut(200, "undeclared", "exact", "tool", 3),
)
REACH = Reach(
    (
        Stretch(0, 100, "", ""),
        Stretch(110, 200, "policy", ""),
        Stretch(210, 300, "policy", "undeclared"),
    ),
    known=True,
    cuts=CUTS,
    turn="t0",
)
OTHER = {"id": "d", "type": "function", "function": {"name": "write", "arguments": "{}"}}
CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
CLIENT: list[dict[str, Any]] = [
    {"role": "user", "content": "u"},
    {"role": "tool", "tool_call_id": "none", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [OTHER, CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "b"},
    {"role": "user", "content": "c"},
]
SPANS = tuple(MessageSpan(at, 60 * at + 5, 60 * at + 60) for at in range(5))


def example(reach: Reach = REACH) -> Turn:
    """A turn of five messages with 60 tokens each."""
    rendered = Rendered(array("q", range(310)), SPANS)
    return turn_of(TurnPlan(reach=reach), prepare(CLIENT, (), (), 0), rendered)


def test_without_a_splice_the_first_edit_has_all_after_it() -> None:
    """The account names its message, its policy, and the messages that were prefilled again; the
    engine's reason says why nothing was copied."""
    counts = TokenCounts(310, 100, prefilled=210)
    paid = paid_by(
        example(),
        settle(REACH, counts, page=1),
        counts,
        outcome=Outcome.REPREFILLED,
        reason=Reason.SOURCE_EVICTED,
    )
    assert paid is not None and (paid.lost, paid.new, paid.compared) == (180, 30, "t0")
    (bust,) = paid.busts
    assert bust.origin == Origin("policy:cut", 1, "tool", "", "amortize", "source_evicted")
    assert (bust.tokens, bust.at, bust.messages) == (180, 110, (1, 4))


def test_after_a_splice_each_edit_has_its_own() -> None:
    """Tokens that the engine computed again after an edit are that edit's; those that no splice
    could carry are the exact edit's, under the name of the tool."""
    counts = TokenCounts(310, 100, 60, prefilled=150)
    cache = settle(REACH, counts, copies=[(140, 200)], page=1)
    paid = paid_by(example(), cache, counts, outcome=Outcome.SPLICED, reason=Reason.SPLICED)
    assert paid is not None
    assert [(bust.origin, bust.tokens) for bust in paid.busts] == [
        (Origin("undeclared", 3, "tool", "read", "exact", "exact"), 90),
        (Origin("policy:cut", 1, "tool", "", "amortize", "computed_again"), 30),
    ]


def test_of_two_spliced_edits_the_nearest_is_to_blame() -> None:
    """An edit that was spliced over has no part in what is computed again after the next one."""
    cuts = (CUTS[0], CUTS[1]._replace(mode="amortize"))
    stretches = (*REACH.stretches[:2], Stretch(210, 300, "policy", ""))
    reach = Reach(stretches, known=True, cuts=cuts)
    counts = TokenCounts(310, 100, 170, prefilled=40)
    cache = settle(reach, counts, copies=[(110, 200), (220, 300)], page=1)
    assert [(loss.cut, loss.tokens) for loss in cache.losses] == [(cuts[1], 10)]
    assert cache.busts == {"undeclared": 10}


@pytest.mark.parametrize(
    ("page", "lost"),
    [(1, {"engine": 45}), (16, {"engine": 41, "page": 4}), (None, {"page": 45})],
)
def test_partial_pages_are_apart_from_what_the_engine_lost(
    page: int | None, lost: dict[str, int]
) -> None:
    """Tokens beyond the last whole page can't be cached; the rest was evicted. If the page's size
    isn't known, few tokens count as a page."""
    reach = Reach((Stretch(0, 100, "", ""),), known=True)
    counts = TokenCounts(310, 55, prefilled=255)
    cache = settle(reach, counts, page=page)
    assert {loss.cause: loss.tokens for loss in cache.losses} == lost
    assert cache.busts == {}


def test_an_uncertain_name_is_the_reason_where_it_is() -> None:
    """An edit that a named session would splice says so."""
    cuts = (CUTS[1]._replace(withheld=True),)
    reach = Reach((Stretch(210, 300, "undeclared", "undeclared"),), known=True, cuts=cuts)
    counts = TokenCounts(310, prefilled=310)
    paid = paid_by(example(reach), settle(reach, counts), counts)
    assert paid is not None and paid.busts[0].origin.why == "unnamed_session"


def test_what_comes_from_elsewhere_pays_for_the_last_losses() -> None:
    """An engine doesn't say where it put reused tokens: no loss may exceed what was prefilled."""
    counts = TokenCounts(310, 100, 0, 150, 60)
    paid = paid_by(example(), settle(REACH, counts, page=1), counts)
    assert paid is not None and (paid.lost, paid.new) == (60, 0)


def test_without_counts_nothing_is_said() -> None:
    """An account of zeros would claim that nothing was lost."""
    counts = TokenCounts()
    assert paid_by(example(), settle(REACH, counts), counts) is None
    assert account_of(None) is None


def test_too_many_causes_are_summed() -> None:
    """The account is bounded, and its entries still add up."""
    busts = [Bust(Origin("undeclared", at), at + 1, at, (at, at)) for at in range(2 * MAX_BUSTS)]
    found = largest(busts)
    assert len(found) == MAX_BUSTS
    assert sum(bust.tokens for bust in found) == sum(bust.tokens for bust in busts)
    assert found[-1].origin == Origin(OTHERS) and found[-1].entries == MAX_BUSTS + 1
    assert largest(busts[:MAX_BUSTS]) == tuple(reversed(busts[:MAX_BUSTS]))


def test_time_and_money_are_left_open_where_they_are_unknown() -> None:
    """Unknown speed is no speed, and without a price there is no member for money; a loss costs
    the difference to cached tokens, a turn all its tokens."""
    counts = TokenCounts(310, 100, prefilled=210)
    cache, receipt = settle(REACH, counts, page=1), Receipt(message_id="m", tokens=counts)
    plain = account_of(paid_by(example(), cache, counts))
    assert plain is not None
    assert plain["lost_seconds"] is plain["entries"][0]["seconds"] is None
    assert "money" not in plain and "money" not in plain["entries"][0]
    priced = paid_for(example(), receipt, cache, prefill_us=50.0, price=PRICE, generated=7)
    shown = account_of(priced)
    assert shown is not None
    assert shown["lost_seconds"] == pytest.approx(180 * 50e-6)
    assert shown["entries"][0]["seconds"] == pytest.approx(180 * 50e-6)
    assert shown["entries"][0]["money"] == pytest.approx(180 * 1.5e-6)
    assert shown["money"] == {
        "currency": "EUR",
        "lost": pytest.approx(180 * 1.5e-6),
        "turn": pytest.approx((210 * 2 + 100 * 0.5 + 7 * 10) / 1e6),
    }
    unknown = account_of(
        paid_for(example(), receipt, cache, prefill_us=None, price=PRICE, generated=None)
    )
    assert unknown is not None and unknown["money"]["turn"] is None
    assert "entries" not in (account_of(priced, entries=False) or {})


def test_an_estimate_names_the_edit_of_the_plan() -> None:
    """For an engine whose tokens aren't known, the first edit of the messages is to blame."""
    reach = Reach((Stretch(0, 80, "undeclared", "undeclared"),), known=True, estimated=True)
    prepared = prepare(CLIENT, (), (), 0)
    edits = (
        SimpleNamespace(cause="policy:cut", message=1, role="tool", mode="amortize"),
        SimpleNamespace(cause="undeclared", message=3, role="tool", mode="exact"),
    )
    plan = cast("TurnPlan", SimpleNamespace(reach=reach, edits=edits))
    counts = TokenCounts(310, 200, prefilled=110)
    cache = settle(reach, counts)
    assert cache.losses == (Loss("undeclared", None, 0, 80, placed=False),)
    paid = paid_by(turn_of(plan, prepared, None), cache, counts)
    assert paid is not None and paid.estimated
    (bust,) = paid.busts
    assert bust.origin == Origin("undeclared", 3, "tool", "read", "exact", "not_spliced")
    assert (bust.at, bust.messages) == (None, None)
