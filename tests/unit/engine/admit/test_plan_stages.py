"""Gaps that are joined by price, against every other choice."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.admit.plan import Plan, copy_runs, plan_turn
from leyline_engine.contract import MAX_EXTENTS, CopySegment, ReuseKind

RUNS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 30)), min_size=1, max_size=5)


def laid(runs: list[tuple[int, int]], prefix: int) -> tuple[int, list[CopySegment]]:
    """The length of a prompt that has gaps and copies in turn, and its copies."""
    at, copies = prefix, []
    for gap, size in runs:
        copies.append(CopySegment(0, at + gap, at + gap + size, at + gap))
        at += gap + size
    return at + 3, copies


def price(plan: Plan, stage_cost: int) -> int:
    """The price of a plan, in prefilled tokens."""
    return plan.prefilled + stage_cost * plan.stages


@given(RUNS, st.integers(0, 40), st.integers(0, 5))
def test_no_other_choice_of_runs_is_cheaper(
    runs: list[tuple[int, int]], stage_cost: int, prefix: int
) -> None:
    """Of all subsets of the runs, the plan's has the least of tokens and forwards together."""
    length, copies = laid(runs, prefix)

    def planned(some: list[CopySegment], cost: int = 0) -> Plan:
        return plan_turn(length, prefix, some, [length], sink=0, stage_cost=cost)

    whole = copy_runs(copies)
    cheapest = min(
        price(
            planned([c for run, kept in zip(whole, chosen, strict=True) if kept for c in run]),
            stage_cost,
        )
        for chosen in product([True, False], repeat=len(whole))
    )
    assert price(planned(copies, stage_cost), stage_cost) == cheapest


def test_a_run_that_follows_the_prefix_needs_no_forward() -> None:
    """However short it is, it is copied: prefilling it would save nothing."""
    copies = [CopySegment(0, 10, 13, 10), CopySegment(0, 20, 60, 15), CopySegment(0, 65, 70, 66)]
    plan = plan_turn(80, 10, copies, [100], sink=0, stage_cost=20)
    assert [copy.dest for copy in plan.copies] == [10, 15]
    assert plan.stages == 1
    assert plan_turn(80, 10, copies, [100], sink=0).stages == 2


def test_runs_of_pages_are_weighed_whole() -> None:
    """Copies that follow each other count together, clipped to the pages that they cover."""
    copies = [CopySegment(0, 40, 60, 40), CopySegment(1, 5, 25, 60)]
    assert plan_turn(99, 16, copies, [99, 99], sink=0, stage_cost=32, page=16).stages == 1
    assert not plan_turn(99, 16, copies, [99, 99], sink=0, stage_cost=33, page=16).copies


def test_the_spliced_extents_are_reported_up_to_a_bound() -> None:
    """Copies that meet are one extent, those for reuse none, and too many are not listed."""
    copies = [CopySegment(0, 5, 9, 5), CopySegment(1, 9, 20, 9), CopySegment(2, 30, 40, 30)]
    kinds = (None, None, ReuseKind.SESSION)
    plan = plan_turn(60, 3, copies, [60] * 3, sink=0, kinds=kinds)
    assert plan.spliced_extents == ((5, 20),)
    for count in (MAX_EXTENTS, MAX_EXTENTS + 1):
        length, many = laid([(1, 1)] * count, 0)
        found = plan_turn(length, 0, many, [length], sink=0).spliced_extents
        assert len(found) == (count if count == MAX_EXTENTS else 0)
