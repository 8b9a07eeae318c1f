"""The plan over larger pages: whole pages of the prompt, from wherever their rows lie."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from leyline_engine.admit.plan import (
    Plan,
    copy_runs,
    page_floor,
    plan_turn,
)
from leyline_engine.contract import CopySegment, ReuseKind

PAGES = (1, 2, 3, 4, 16)


@dataclass(frozen=True)
class Case:
    """The arguments of plan_turn."""

    length: int
    prefix: int
    copies: list[CopySegment]
    available: list[int]
    sink: int
    min_copy: int
    page: int

    def plan(self) -> Plan:
        return plan_turn(
            self.length,
            self.prefix,
            self.copies,
            self.available,
            sink=self.sink,
            min_copy=self.min_copy,
            kinds=(None, ReuseKind.SESSION),
            page=self.page,
        )


@st.composite
def cases(draw: st.DrawFn, pages: tuple[int, ...] = PAGES) -> Case:
    """Sorted, non-overlapping copies, many of them adjacent, from partly evicted sources."""
    length, page = draw(st.integers(1, 120)), draw(st.sampled_from(pages))
    copies, dest = [], 0
    for _ in range(draw(st.integers(0, 6))):
        dest += draw(st.just(0) | st.integers(0, 20))
        start, size = draw(st.integers(0, 60)), draw(st.integers(0, 40))
        copies.append(CopySegment(draw(st.integers(0, 1)), start, start + size, dest))
        dest += size
    return Case(
        length,
        page_floor(draw(st.integers(0, length - 1)), page),
        copies,
        [page_floor(draw(st.integers(0, 120)), page) for _ in range(2)],
        draw(st.integers(0, 64) | st.just(10**9)),
        draw(st.integers(1, 40)),
        page,
    )


def by_token(case: Case) -> dict[int, tuple[int, int]]:
    """The source and place of every token that can be copied, by its position in the prompt."""
    first = max(case.prefix, case.sink)
    return {
        copy.dest + i: (copy.source, copy.start + i)
        for copy in case.copies
        for i in range(copy.length)
        if copy.start + i < case.available[copy.source] and first <= copy.dest + i < case.length - 1
    }


def expected(case: Case) -> dict[int, tuple[int, int]]:
    """The copied tokens, page by page: pages that lie together go together, if they are enough."""
    tokens, page = by_token(case), case.page
    whole = [
        number
        for number in range(case.length // page)
        if all(at in tokens for at in range(number * page, (number + 1) * page))
    ]
    found: dict[int, tuple[int, int]] = {}
    for _, group in groupby(enumerate(whole), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in group]
        if len(numbers) * page >= case.min_copy:
            places = range(numbers[0] * page, (numbers[-1] + 1) * page)
            found |= {at: tokens[at] for at in places}
    return found


def copied(plan: Plan) -> dict[int, tuple[int, int]]:
    return {c.dest + i: (c.source, c.start + i) for c in plan.copies for i in range(c.length)}


@given(cases(PAGES[1:]))
def test_whole_pages_are_copied_and_no_others(case: Case) -> None:
    """A token is copied exactly if its page is, and a page if all of it can be, with its run."""
    assert copied(case.plan()) == expected(case)


@given(cases())
def test_steps_tile_the_prompt_at_page_edges(case: Case) -> None:
    """Steps cover [prefix, length) once; runs begin and end with pages; the last token is computed.

    No step needs a forward that it could share with its neighbour.
    """
    plan = case.plan()
    cursor = case.prefix
    steps = [(c.dest, c.dest_end) for c in plan.copies]
    steps += [(p.start, p.end) for p in plan.prefills]
    for start, end in sorted(steps):
        assert start == cursor < end
        cursor = end
    assert cursor == case.length
    assert plan.prefills[-1].end == case.length
    assert all(a.end < b.start for a, b in pairwise(plan.prefills))
    for run in copy_runs(plan.copies):
        assert run[0].dest % case.page == 0
        assert run[-1].dest_end % case.page == 0
    assert all(step.end % case.page == 0 for step in plan.prefills[:-1])


@given(cases((1,)))
def test_pages_of_one_token_change_nothing(case: Case) -> None:
    """With pages of one token, each copy is made as far as it can be, if that is long enough."""
    first = max(case.prefix, case.sink)
    found: dict[int, tuple[int, int]] = {}
    for copy in case.copies:
        low = max(copy.dest, first)
        high = min(copy.dest_end, case.length - 1)
        high = min(high, case.available[copy.source] - copy.start + copy.dest)
        if high - low >= case.min_copy:
            shift = copy.start - copy.dest
            found |= {at: (copy.source, at + shift) for at in range(low, high)}
    assert copied(case.plan()) == found


@given(cases())
def test_evicted_tokens_do_not_depend_on_pages(case: Case) -> None:
    """Only tokens of edits whose source is gone count as evicted, not those between page edges."""
    first = max(case.prefix, case.sink)
    gone = [
        at
        for copy in case.copies
        if copy.source == 0
        for at, place in zip(
            range(copy.dest, copy.dest_end), range(copy.start, copy.end), strict=True
        )
        if place >= case.available[0] and first <= at < case.length - 1
    ]
    assert case.plan().evicted == len(gone)


def test_adjacent_copies_share_a_page() -> None:
    """A page is copied from two sources where one copy ends in it and the next begins there."""
    copies = [CopySegment(0, 5, 15, 32), CopySegment(1, 90, 100, 42)]
    plan = plan_turn(80, 0, copies, [40, 100], sink=4, min_copy=16, page=16)
    assert plan.copies == (CopySegment(0, 5, 15, 32), CopySegment(1, 90, 96, 42))
    assert [(p.start, p.end) for p in plan.prefills] == [(0, 32), (48, 80)]
    short = plan_turn(80, 0, copies, [40, 100], sink=4, min_copy=17, page=16)
    assert not short.copies
