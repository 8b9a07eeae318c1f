"""The plan: its steps tile the prompt, whatever is asked and whatever is gone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.admit.plan import clip_copies, forget_limit, plan_turn
from leyline_engine.contract import CopySegment, Directive, LineageRun, Mode


@dataclass(frozen=True)
class Case:
    """The arguments of plan_turn."""

    length: int
    prefix: int
    copies: list[CopySegment]
    available: list[int]
    sink: int
    min_copy: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sorted, non-overlapping copies, some beyond the prompt, from partly evicted sources."""
    length = draw(st.integers(1, 120))
    copies, dest = [], 0
    for _ in range(draw(st.integers(0, 5))):
        dest += draw(st.integers(0, 20))
        start, size = draw(st.integers(0, 60)), draw(st.integers(0, 40))
        copies.append(CopySegment(draw(st.integers(0, 1)), start, start + size, dest))
        dest += size
    return Case(
        length,
        draw(st.integers(0, length - 1)),
        copies,
        [draw(st.integers(0, 100)), draw(st.integers(0, 100))],
        draw(st.integers(0, 64) | st.just(10**9)),
        draw(st.integers(1, 5)),
    )


@given(cases())
def test_steps_tile_the_prompt(case: Case) -> None:
    """Copies and prefills cover [prefix, length) once, in order, each of them non-empty."""
    plan = plan_turn(
        case.length,
        case.prefix,
        case.copies,
        case.available,
        sink=case.sink,
        min_copy=case.min_copy,
    )
    spans = sorted(
        [(c.dest, c.dest_end) for c in plan.copies] + [(p.start, p.end) for p in plan.prefills]
    )
    cursor = case.prefix
    for start, end in spans:
        assert start == cursor < end
        cursor = end
    assert cursor == case.length
    assert plan.prefix + plan.spliced + plan.prefilled == case.length
    # The prefills are maximal: no forward more than needed.
    assert all(a.end < b.start for a, b in pairwise(plan.prefills))


@given(cases())
def test_copies_stay_within_what_was_asked_and_is_there(case: Case) -> None:
    """Every copied token was asked for at that place, is available, and lies after the sink."""
    plan = plan_turn(
        case.length,
        case.prefix,
        case.copies,
        case.available,
        sink=case.sink,
        min_copy=case.min_copy,
    )
    asked = {(c.source, c.start + i, c.dest + i) for c in case.copies for i in range(c.length)}
    allowed = {
        (source, start, dest)
        for source, start, dest in asked
        if start < case.available[source] and max(case.prefix, case.sink) <= dest < case.length - 1
    }
    copied = {(c.source, c.start + i, c.dest + i) for c in plan.copies for i in range(c.length)}
    assert copied <= allowed
    if case.min_copy == 1:
        assert copied == allowed
    assert all(copy.length >= case.min_copy for copy in plan.copies)
    evicted = {
        (source, start, dest)
        for source, start, dest in asked
        if start >= case.available[source] and max(case.prefix, case.sink) <= dest < case.length - 1
    }
    assert plan.evicted == len(evicted)


@given(cases())
def test_last_token_and_sink_are_prefilled(case: Case) -> None:
    """The last token's logits are computed, and so is every uncached position of the sink."""
    plan = plan_turn(case.length, case.prefix, case.copies, case.available, sink=case.sink)
    computed = {p for step in plan.prefills for p in range(step.start, step.end)}
    assert case.length - 1 in computed
    assert set(range(case.prefix, min(case.sink, case.length))) <= computed


def test_forget_limit() -> None:
    """A source lends what lies before the forgotten span and before anything moved into it."""
    directives = [
        Directive(30, 40),
        Directive(50, 60, (), Mode.FORGET),
        Directive(5, 6, (), source=1),
    ]
    assert forget_limit(directives, 0, (), 100) == 50
    assert forget_limit(directives, 0, (LineageRun(20, "l"),), 100) == 20
    assert forget_limit(directives, 1, (LineageRun(20, "l"),), 100) == 100
    assert forget_limit([], 0, (), 7) == 7


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=6), st.integers(0, 60))
def test_clip_copies(spans: list[tuple[int, int]], limit: int) -> None:
    """The rest of each copy starts where it did and ends below the limit; none is empty."""
    copies = [CopySegment(0, start, start + size, 7) for start, size in spans]
    expected = [
        CopySegment(0, c.start, min(c.end, limit), c.dest)
        for c in copies
        if min(c.end, limit) > c.start
    ]
    assert list(clip_copies(copies, [limit])) == expected
