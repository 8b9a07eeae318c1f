"""Events of the live page: one ring for each tenant that is looked at, and bounds everywhere."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge
from support.clock import Clock
from support.metrics_page import value_of

from leyline_engine.contract import Outcome, Receipt, TokenCounts
from leyline_proxy.live.feed import (
    FeedLimits,
    LiveFeed,
    NoPlaceForViewersError,
    TooManyViewersError,
    Viewer,
)
from leyline_proxy.live.stream import MAX_SESSIONS, sessions_document
from leyline_proxy.live.trend import MAX_TENANTS, STEP_S, STEPS, Trends
from leyline_proxy.model.session import EditRecord, Session, TurnSummary
from leyline_proxy.sessions.summary import overview

TOKENS = TokenCounts(prompt=100, prefix=60, spliced=20, reused=10, prefilled=10, freed=5)


def feed(**limits: float) -> tuple[LiveFeed, Clock, Gauge]:
    """A feed with its clock and its gauge."""
    clock = Clock(1000.0)
    gauge = Gauge("viewers", "Viewers.", registry=CollectorRegistry())
    chosen = FeedLimits(**limits)  # type: ignore[arg-type]
    return LiveFeed(gauge, chosen, now=clock, clock=clock), clock, gauge


def session(index: int = 0, *, tenant: str = "red", name: str = "s") -> Session:
    """A session whose newest turn has this number."""
    edit = EditRecord(3, "tool", "policy:cut", "amortize", (10, 20), 2)
    turn = TurnSummary(
        index=index,
        turn=f"t{index}",
        created=1.0,
        planned=Outcome.SPLICED,
        reason=None,
        edits=(edit,),
        receipt=Receipt(message_id="m", outcome=Outcome.SPLICED, tokens=TOKENS),
    )
    return Session(
        id=name,
        tenant=tenant,
        key="k",
        turns=(),
        history=(turn,),
        next_index=index + 1,
        updated=float(index + 1),
        created=1.0,
    )


def numbers(viewer: Viewer) -> list[int]:
    """Indices of the turns that a viewer is given."""
    return [orjson.loads(event.data)["turn"]["index"] for event in viewer.take()]


def test_a_viewer_is_given_turns_with_tokens_and_edits() -> None:
    """An event holds the session's line and the turn as the API shows it."""
    live, _, _ = feed()
    with live.viewing("red") as viewer:
        assert viewer.behind
        viewer.begin_anew()
        live.settled(session(4))
        (event,) = viewer.take()
        told = orjson.loads(event.data)
    assert (told["session"]["id"], told["session"]["turns"]) == ("s", 5)
    assert told["turn"]["receipt"]["tokens"]["freed"] == 5
    assert told["turn"]["edits"][0]["cause"] == "policy:cut"
    assert told["turn"]["receipt"]["lineage"] is None


async def test_a_tenant_is_told_nothing_of_another() -> None:
    """Neither events nor their numbers show a viewer that another tenant had a turn."""
    live, _, _ = feed()
    with live.viewing("red") as red, live.viewing("blue") as blue:
        red.begin_anew()
        first = blue.begin_anew()
        live.settled(session(0, tenant="red"))
        live.lost("red", "s", "refused")
        assert len(red.take()) == 2
        assert not blue.take()
        assert blue.begin_anew() == first
        assert not await live.trend("blue")


async def test_where_nobody_looks_nothing_is_kept_but_sums() -> None:
    """A viewer that comes later finds the hour's sums and no events from before."""
    live, _, _ = feed()
    for index in range(1000):
        live.settled(session(index))
    with live.viewing("red") as viewer:
        viewer.begin_anew()
        assert not viewer.take()
    (step,) = await live.trend("red")
    assert (step.turns, step.prompt, step.cached) == (1000, 100_000, 60_000)
    assert (step.spliced, step.reused) == (20_000, 10_000)


@given(st.lists(st.integers(0, 12), max_size=20))
def test_a_viewer_gets_every_event_once_or_is_told_that_it_is_behind(bursts: list[int]) -> None:
    """No event is lost without notice, doubled, or out of order, at any pace of the viewer."""
    live, _, _ = feed(ring=8)
    sent = 0
    with live.viewing("red") as viewer:
        viewer.begin_anew()
        due = 0
        for burst in bursts:
            for _ in range(burst):
                live.settled(session(sent))
                sent += 1
            if viewer.behind:
                assert burst > 8
                viewer.begin_anew()
            else:
                assert numbers(viewer) == list(range(due, sent))
            due = sent


def test_a_viewer_that_comes_back_goes_on_where_it_was() -> None:
    """The id of the last event resumes for as long as the ring is kept, and no longer."""
    live, clock, _ = feed(lingers_s=60)
    with live.viewing("red") as viewer:
        viewer.begin_anew()
        live.settled(session(0))
        (event,) = viewer.take()
        last = viewer.id_of(event.number)
    live.settled(session(1))
    with live.viewing("red", last) as viewer:
        assert not viewer.behind
        assert numbers(viewer) == [1]
    clock.now += 61
    live.settled(session(2))
    with live.viewing("red", last) as viewer:
        assert viewer.behind


def test_a_ring_of_huge_turns_is_bounded_in_bytes() -> None:
    """Turns of many edits push older events out; the newest is always reported."""
    live, _, _ = feed(ring=8, ring_bytes=20_000)
    huge = session(0)
    edits = huge.history[0].edits * 100
    huge = replace(huge, history=(replace(huge.history[0], edits=edits),))
    with live.viewing("red") as quick, live.viewing("red") as slow:
        for viewer in (quick, slow):
            viewer.begin_anew()
        for _ in range(3):
            live.settled(huge)
            assert not quick.behind
            (event,) = quick.take()
            assert 10_000 < len(event.data) < 20_000
        assert slow.behind
        for index in range(4):
            live.settled(session(index))
        assert not quick.behind
        assert numbers(quick) == [0, 1, 2, 3]
        turn = replace(huge.history[0], edits=edits * 2)
        live.settled(replace(huge, history=(turn,)))
        assert not quick.behind
        assert len(quick.take()) == 1


def test_a_list_of_sessions_has_an_end() -> None:
    """The latest are shown, and it is said how many there are."""
    found = [overview(session(name=f"s{number}")) for number in range(MAX_SESSIONS + 5)]
    shown = sessions_document(found)
    assert [each["id"] for each in shown["sessions"]] == [f"s{n}" for n in range(MAX_SESSIONS)]
    assert shown["total"] == MAX_SESSIONS + 5


@pytest.mark.parametrize(
    "wrong", ["", "-", "x", "0", "ffffffff-1", "{epoch}-99", "{epoch}-", "{epoch}-²", "{epoch}--1"]
)
def test_ids_that_are_none_begin_anew(wrong: str) -> None:
    """An id of another run, of an event that never was, or no id at all is no place to continue
    from."""
    live, _, _ = feed()
    with live.viewing("red") as first:
        epoch = first.begin_anew().partition("-")[0]
        with live.viewing("red", wrong.format(epoch=epoch)) as second:
            assert second.behind


def test_viewers_are_bounded_by_tenant_and_in_all() -> None:
    """One too many of a tenant is a 429, one too many of all a 503; who leaves makes room."""
    live, _, gauge = feed(viewers_of_tenant=2, viewers=3)
    with live.viewing("red"), live.viewing("red"):
        with pytest.raises(TooManyViewersError) as refused, live.viewing("red"):
            pass
        assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "10")
        with live.viewing("blue"):
            with pytest.raises(NoPlaceForViewersError) as full, live.viewing("green"):
                pass
            assert full.value.status == 503
            assert value_of(gauge) == 3
        with live.viewing("green"):
            assert value_of(gauge) == 3
    assert value_of(gauge) == 0


def test_the_hour_is_bounded() -> None:
    """Steps end after an hour, and tenants that were not seen for longest go first."""
    trends = Trends()
    for number in range(2 * STEPS):
        trends.add("red", number * STEP_S, TOKENS)
    now = 2.0 * STEPS * STEP_S
    assert len(trends.of("red", now)) == STEPS
    assert not trends.of("red", now + 3600 + STEP_S)
    for number in range(MAX_TENANTS):
        trends.add(f"t{number}", now, TOKENS)
    assert not trends.of("red", now)
    assert trends.of("t0", now)
