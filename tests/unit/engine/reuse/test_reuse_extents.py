"""Extents to which reuse is restricted: checked, clipped like sets of positions, and reported."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_reuse_matching import Library

from leyline_engine.admit.content_reuse import reuse_counts
from leyline_engine.admit.plan import Plan
from leyline_engine.admit.rules import CheckedRequest
from leyline_engine.contract import (
    MAX_EXTENTS,
    MAX_WITHIN,
    CopySegment,
    EditPayload,
    EnvelopeError,
    ReuseCounts,
    ReuseKind,
    ReuseMode,
    ReusePayload,
    edit_envelope,
    joined,
    restriction,
    split_actions,
)
from leyline_engine.reuse import own
from leyline_engine.reuse.extents import clipped
from leyline_engine.reuse.index import Place
from leyline_engine.reuse.matching import MIN_HIT, Hits
from leyline_engine.reuse.own import OwnTurns

Extents = list[tuple[int, int]]
LIVE = ReuseMode.LIVE


@st.composite
def extents(draw: st.DrawFn, top: int = 60) -> Extents:
    """Sorted, disjoint extents; some of them meet."""
    cuts = sorted(draw(st.sets(st.integers(0, top), max_size=12)))
    return [pair for pair in pairwise(cuts) if draw(st.booleans())]


def positions(spans: Extents) -> set[int]:
    """The positions that extents cover."""
    return {at for start, end in spans for at in range(start, end)}


@given(extents(), extents(), st.integers(1, 6))
def test_clipping_equals_the_intersection_of_positions(
    gaps: Extents, within: Extents, shortest: int
) -> None:
    """Each gap keeps its maximal runs of allowed positions, in order, if they are long enough."""
    expected: Extents = []
    allowed = positions(within)
    for start, end in gaps:
        kept = [at for at in range(start, end) if at in allowed]
        for at in kept:
            if expected and expected[-1][1] == at and at != start:
                expected[-1] = (expected[-1][0], at + 1)
            else:
                expected.append((at, at + 1))
    expected = [(a, b) for a, b in expected if b - a >= shortest]
    assert list(clipped(gaps, within, shortest)) == expected


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 9)), max_size=150))
def test_any_spans_make_a_valid_restriction(drawn: list[tuple[int, int]]) -> None:
    """Spans in any order become a payload's extents: joined where they meet, the longest first."""
    spans = [(start, start + length) for start, length in drawn]
    within = restriction(spans)
    assert ReusePayload(mode=LIVE, within=within).within == within
    assert all(one[1] < other[0] for one, other in pairwise(within))
    whole = joined(spans)
    assert positions(whole) == positions(spans)
    assert set(within) <= set(whole)
    left = [end - start for start, end in whole if (start, end) not in within]
    if left:
        assert len(within) == MAX_WITHIN
        assert max(left) <= min(end - start for start, end in within)


@given(st.integers(0, 2**32), extents(600))
def test_a_restricted_search_finds_what_the_whole_one_finds_there(
    seed: int, within: Extents
) -> None:
    """Hits in extents are the hits in the whole prompt, cut at the extents' edges."""
    rng = random.Random(seed)
    docs = [[rng.randrange(10_000) for _ in range(rng.randint(MIN_HIT, 150))] for _ in range(3)]
    library, prompt = Library(), list[int]()
    library.matcher._min_piece = 16
    for doc in docs:
        library.add([*(rng.randrange(10_000) for _ in range(20)), *doc, 20_000])
        prompt += [*(rng.randrange(10_000) for _ in range(rng.randint(1, 60))), *doc]
    whole = [(hit.dest, hit.dest_end) for hit in library.find(prompt).found]
    assert whole
    gaps = list(clipped([(0, len(prompt))], within, 16))
    found = [(hit.dest, hit.dest_end) for hit in library.find(prompt, gaps).found] if gaps else []
    assert found == list(clipped(whole, within, 16))


@pytest.mark.parametrize(
    ("within", "told"),
    [
        ([[5, 5]], r"within\[0\]: \[5, 5\) is empty"),
        ([[9, 5]], r"within\[0\]: \[9, 5\) is empty"),
        ([[0, 9], [8, 12]], r"within\[1\]: starts at 8, before the previous extent ends at 9"),
        ([[20, 30], [0, 5]], r"within\[1\].*sorted and disjoint"),
        ([[-1, 5]], "within"),
        ([[1, 5, 9]], "within"),
        ([[1, "5"]], "within"),
        ("all", "within"),
        ([[at, at + 1] for at in range(MAX_WITHIN + 1)], "within"),
    ],
)
def test_extents_that_are_none_are_refused_by_name(within: object, told: str) -> None:
    """A malformed restriction never widens what may be copied: the payload is refused."""
    payload = EditPayload(session="s", scope="t", turn="t1")
    envelope = edit_envelope("m", payload, reuse=ReusePayload(mode=LIVE))
    envelope.actions[1].payload["within"] = within
    with pytest.raises(EnvelopeError, match=told):
        split_actions(envelope)


@pytest.mark.parametrize("within", [None, (), ((0, 4), (4, 9), (12, 90))])
def test_a_restriction_survives_the_wire(within: tuple[tuple[int, int], ...] | None) -> None:
    """None, no extent, and extents that meet are three payloads, and all of them are valid."""
    payload = EditPayload(session="s", scope="t", turn="t1")
    asked = ReusePayload(mode=LIVE, within=within, own=True)
    assert split_actions(edit_envelope("m", payload, reuse=asked)).reuse == asked


def counted(plan: Plan, mode: ReuseMode = LIVE) -> ReuseCounts:
    """The account of a plan."""
    asked = ReusePayload(mode=mode)
    request = CheckedRequest(array("q"), None, None, None, (), None, asked, Hits())
    counts = reuse_counts(request, plan)
    assert counts is not None
    return counts


def test_an_account_names_copies_for_reuse_alone() -> None:
    """Copies that meet are one extent, those of an edit are none, and so is all of an observer."""
    copies = (
        CopySegment(0, 0, 20, 40),
        CopySegment(1, 50, 70, 60),
        CopySegment(2, 90, 99, 80),
        CopySegment(1, 0, 10, 100),
    )
    kinds = (None, ReuseKind.SESSION, ReuseKind.CLEAN)
    plan = Plan(200, 0, copies, (), kinds=kinds)
    assert counted(plan).extents == ((60, 89), (100, 110))
    assert counted(plan, ReuseMode.OBSERVE).extents == ()
    assert counted(Plan(200, 0, copies, ())).extents == ()


def test_the_extents_of_an_account_are_bounded() -> None:
    """Of more than the maximum, the first are reported, and the account says so."""
    for count, bounded in ((MAX_EXTENTS, False), (MAX_EXTENTS + 1, True)):
        copies = tuple(CopySegment(0, at, at + 1, at) for at in range(0, 2 * count, 2))
        found = counted(Plan(9999, 0, copies, (), kinds=(ReuseKind.SESSION,)))
        assert found.extents == tuple((at, at + 1) for at in range(0, 2 * MAX_EXTENTS, 2))
        assert (found.bounded, found.session) == (bounded, count)


def test_a_place_of_another_session_stands_for_an_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared beginnings count as own up to where they differ; a bound is reported."""
    library = Library()
    shared = list(range(100))
    mine = library.add([*shared, *range(500, 560)], "own")
    other = library.add([*shared, *range(900, 960)], "other")
    turns = OwnTurns(("t", "own"), [mine])
    found = list(turns.places([Place(mine, 120), Place(other, 68), Place(other, 69)]))
    assert found == [Place(mine, 120), Place(mine, 68)]
    assert not turns.bounded
    monkeypatch.setattr(own, "MAX_OTHERS", 0)
    turns = OwnTurns(("t", "own"), [mine])
    assert list(turns.places([Place(other, 0)])) == []
    assert turns.bounded
    assert list(OwnTurns(("t", "own"), []).places([Place(other, 0)])) == []
