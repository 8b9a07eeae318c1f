"""Plans for models that keep state per sequence, against a list of what must hold of each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.admit.anchors import Anchors, StateCopy, StateTerms
from leyline_engine.admit.plan import Plan, Prefill, copy_runs, plan_turn
from leyline_engine.contract import CopySegment

EDITS = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 12), st.integers(1, 40)), min_size=1, max_size=5
)
"""Tokens that are put in, tokens that are cut, tokens that are kept after them."""
POSITIONS = st.lists(st.integers(1, 300), max_size=12)


def edited(
    edits: list[tuple[int, int, int]], prefix: int, page: int = 1
) -> tuple[int, int, list[CopySegment]]:
    """Lengths of a prompt and its source, and the copies between them."""
    source = dest = prefix
    copies = [CopySegment(0, 0, prefix, 0)] if prefix else []
    for put, cut, kept in edits:
        source, dest = source + cut * page, dest + put * page
        copies.append(CopySegment(0, source, source + kept * page, dest))
        source, dest = source + kept * page, dest + kept * page
    return dest + 3, source, copies


def check(plan: Plan, anchors: Anchors, native: int, terms: StateTerms, page: int) -> None:
    """Steps tile the prompt, forwards start at anchors, and runs end at them."""
    steps = sorted(
        [(c.dest, c.dest_end) for c in plan.copies] + [(p.start, p.end) for p in plan.prefills]
    )
    assert [begin for begin, _ in steps] == [plan.prefix, *(end for _, end in steps[:-1])]
    assert steps[-1][1] == plan.length
    assert native <= plan.prefix <= max(native, terms.rows)
    runs = {run[-1].dest_end: run for run in copy_runs(plan.copies)}
    for step in plan.prefills:
        run = runs.get(step.start)
        assert run is not None or step.start == native
        if step.end < plan.length:
            assert (step.end - step.start) % terms.grid == 0
    for end, run in runs.items():
        last = run[-1]
        assert anchors.last(last.end) == last.end
        assert StateCopy(0, last.end, end) in plan.states
        assert run[0].dest % page == 0
        assert end % page == 0
    assert all(anchors.last(state.position) == state.position for state in plan.states)
    assert all(state.dest % page == 0 for state in plan.states)


@given(EDITS, st.integers(0, 90), POSITIONS, st.integers(0, 30), st.sampled_from([1, 4, 16]))
def test_runs_end_and_forwards_start_at_anchors(
    edits: list[tuple[int, int, int]], prefix: int, positions: list[int], rows: int, grid: int
) -> None:
    """Whatever is cut, no fresh token follows a place whose state is gone."""
    length, source, copies = edited(edits, prefix)
    anchors = Anchors.at(p for p in positions if p <= source)
    native = anchors.last(prefix)
    terms = StateTerms((anchors,), rows=min(prefix, native + rows), grid=grid)
    plan = plan_turn(length, native, copies, [source], sink=0, state=terms)
    check(plan, anchors, native, terms, 1)
    plain = plan_turn(length, native, copies, [source], sink=0, joins=True)
    assert plan.copied <= plain.copied


@given(EDITS, st.integers(0, 20), st.integers(0, 20), st.integers(1, 60))
def test_with_a_window_whole_pages_are_copied_up_to_groups_of_anchors(
    edits: list[tuple[int, int, int]], prefix: int, alive: int, window: int
) -> None:
    """A source that still has its last windows' rows lends all that ends there."""
    page = 4
    length, source, copies = edited(edits, prefix * page, page)
    anchors = Anchors(((max(0, source - alive), source),))
    native = anchors.last(prefix * page, step=page)
    terms = StateTerms((anchors,), rows=prefix * page, window=window)
    plan = plan_turn(length, native, copies, [source], sink=0, page=page, state=terms)
    check(plan, anchors, native, terms, page)
    short = [run for run in copy_runs(plan.copies) if run[-1].dest_end - run[0].dest < window]
    for run in short:
        # What the window reads in front of the run was computed again, or ends at an anchor.
        before = [p for p in plan.prefills if p.end == run[0].dest]
        assert before or run[0].dest == native or run[-1].length >= window


def test_a_deletion_follows_cached_rows_without_a_forward() -> None:
    """The last anchor in front of the cut is far away, and nothing is computed again for it."""
    terms = StateTerms((Anchors.at([64, 500]),), rows=120)
    copies = [CopySegment(0, 0, 120, 0), CopySegment(0, 180, 520, 120)]
    plan = plan_turn(470, 64, copies, [520], sink=32, state=terms)
    assert (plan.prefix, plan.copies) == (120, (CopySegment(0, 180, 500, 120),))
    assert plan.prefills == (Prefill(440, 470),)
    assert plan.states == (StateCopy(0, 500, 440),)


def test_a_replacement_is_computed_from_the_last_anchor_to_the_grid() -> None:
    """Its forward leaves an anchor at a multiple of the grid, into the run that follows."""
    terms = StateTerms((Anchors.at([64, 300, 500]),), rows=120, grid=64)
    copies = [CopySegment(0, 0, 120, 0), CopySegment(0, 180, 520, 127)]
    plan = plan_turn(480, 64, copies, [520], sink=32, state=terms)
    assert plan.prefills == (Prefill(64, 128), Prefill(447, 480))
    assert plan.copies == (CopySegment(0, 181, 500, 128),)
    assert plan.states == (StateCopy(0, 300, 247), StateCopy(0, 500, 447))


def test_nothing_is_copied_to_where_no_state_is() -> None:
    """Without an anchor after the cut all of it counts as evicted."""
    terms = StateTerms((Anchors.at([64]),), rows=64)
    copies = [CopySegment(0, 0, 64, 0), CopySegment(0, 80, 200, 64)]
    plan = plan_turn(190, 64, copies, [200], sink=32, state=terms)
    assert (plan.copied, plan.evicted) == (0, 120)


@given(POSITIONS, POSITIONS, st.integers(0, 320), st.integers(1, 8), st.integers(0, 7))
def test_the_last_anchor_is_found_as_by_counting(
    some: list[int], others: list[int], position: int, step: int, phase: int
) -> None:
    """Groups, their common part and phases agree with sets of positions."""

    def groups(starts: list[int]) -> tuple[Anchors, set[int]]:
        every = {p + i for p in starts for i in range(p % 5 + 1)}
        edges = sorted(p for p in every if p - 1 not in every)
        ends = sorted(p for p in every if p + 1 not in every)
        return Anchors(tuple(zip(edges, ends, strict=True))), every

    (first, ones), (second, twos) = groups(some), groups(others)
    both = first.common(second)
    fitting = {p for p in ones & twos if p <= position and (p - phase) % step == 0}
    assert both.last(position, phase=phase, step=step) == max(fitting, default=0)
    inside = list(both.within(10, position))
    assert set(inside) <= {p for p in ones & twos if 10 < p <= position}
    assert bool(inside) == any(10 < p <= position for p in ones & twos)
