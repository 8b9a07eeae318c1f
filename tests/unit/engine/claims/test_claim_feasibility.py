"""The admission check against sets of pages counted one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from leyline_engine.claims.events import Run
from leyline_engine.claims.feasibility import Arithmetic, Demand, Feasibility, check
from leyline_engine.claims.protection import ClaimKey, Protection
from leyline_engine.claims.runs import joined

SGLANG = Arithmetic(page_size=4, clip_output=32, strict=True)
MICRO = Arithmetic(page_size=4, clip_output=32, strict=False, whole_pages=True)
SHARED = {"x": ("x", 0), "y": ("x", 4), "z": ("y", 6), "none": ("none", 0)}
"""The beginning of each source: so many pages of another."""
SOURCES = ("x", "y", "z")


def page_of(source: str, number: int) -> tuple[str, int]:
    """The name of a page: by the source that first brought it."""
    front, shared = SHARED[source]
    return page_of(front, number) if number < shared else (source, number)


def runs_along(source: str, numbers: Iterable[int]) -> tuple[Run, ...]:
    """Pages of a source, in order."""
    pages = [page_of(source, number) for number in numbers]
    return joined(Run(name, number, number + 1) for name, number in pages)


def pages_in(runs: Iterable[Run]) -> set[tuple[str, int]]:
    """The pages of runs."""
    return {(run.source, page) for run in runs for page in range(run.start, run.end)}


@dataclass(frozen=True)
class Held:
    """A claim over pages ``[start, end)`` but for a hole."""

    key: ClaimKey
    source: str
    start: int
    end: int
    hole: int
    deadline: int | None

    @property
    def runs(self) -> tuple[Run, ...]:
        holed = self.start < self.hole < self.end - 1
        numbers = range(self.start, self.end)
        return runs_along(self.source, (n for n in numbers if not (holed and n == self.hole)))

    @property
    def pages(self) -> set[tuple[str, int]]:
        return pages_in(self.runs)


@st.composite
def held_claims(draw: st.DrawFn) -> list[Held]:
    """Claims of three tenants over three sources; some equal, nested or overlapping."""
    found = []
    for number in range(draw(st.integers(0, 8))):
        start = draw(st.integers(0, 10))
        found.append(
            Held(
                (draw(st.sampled_from("abc")), f"c{number}"),
                draw(st.sampled_from(SOURCES)),
                start,
                start + draw(st.integers(1, 6)),
                draw(st.integers(0, 16)),
                draw(st.none() | st.sampled_from([50, 100, 200, 300])),
            )
        )
    return found


DEMANDS = st.builds(
    lambda tenant, extra, output, source, matched: Demand(
        tenant, matched * 4 + extra, output, runs_along(source, range(matched))
    ),
    st.sampled_from("abd"),
    st.integers(0, 120),
    st.integers(0, 60),
    st.sampled_from([*SOURCES, "none"]),
    st.integers(0, 14),
)


def fits(demand: Demand, claims: list[Held], arithmetic: Arithmetic, usable: int) -> bool:
    """The inequality over sets of pages: what is locked, and all that the request comes to hold."""
    page = arithmetic.page_size
    locked = set().union(*(claim.pages for claim in claims)) if claims else set()
    shared = pages_in(demand.matched) & locked
    work = demand.prompt_tokens - len(shared) * page + min(demand.max_new_tokens, 32)
    if arithmetic.whole_pages:
        while work % page:
            work += 1
    active = work + page
    total = len(locked) * page + active
    return total < usable if arithmetic.strict else total <= usable


@settings(max_examples=examples(300))
@given(
    claims=held_claims(),
    gone=st.sets(st.integers(0, 7)),
    demand=DEMANDS,
    arithmetic=st.sampled_from([SGLANG, MICRO]),
    pages=st.integers(1, 60),
)
def test_the_answer_is_that_of_counting_pages(
    claims: list[Held],
    gone: set[int],
    demand: Demand,
    arithmetic: Arithmetic,
    pages: int,
) -> None:
    """It gives the fit, the claims in the way, and the first deadline that helps; after changes
    too."""
    usable, now = pages * 4, 40
    protection = Protection()
    for claim in claims:
        protection.hold(claim.key, claim.runs, claim.deadline)
    for number in sorted(gone & set(range(len(claims)))):
        protection.let_go(claims[number].key)
    left = [claim for number, claim in enumerate(claims) if number not in gone]
    assert protection.pages == len(set().union(*(c.pages for c in left)) if left else set())

    admission = check(demand, protection, arithmetic, usable, now)

    own = pages_in(demand.matched)
    covered = [claim for claim in left if claim.pages <= own]
    if fits(demand, left, arithmetic, usable):
        assert admission.feasibility is Feasibility.FITS
        assert admission.blocking == () and admission.retry_after_ms is None
        return
    only_own = [
        Held(c.key, source, page, page + 1, -1, c.deadline)
        for c in left
        for source, page in c.pages & own
    ]
    assert set().union(*(c.pages for c in only_own)) == own & set().union(*(c.pages for c in left))
    if not fits(demand, only_own, arithmetic, usable):
        assert admission.feasibility is Feasibility.TOO_LARGE
        return
    assert admission.feasibility is Feasibility.BLOCKED
    blocking = {claim.key for claim in left if claim not in covered}
    assert set(admission.blocking) == blocking
    assert set(admission.own) == {name for owner, name in blocking if owner == demand.tenant}
    assert admission.others == sum(owner != demand.tenant for owner, _ in blocking)
    helps = [
        deadline
        for deadline in sorted({c.deadline for c in left if c.deadline is not None})
        if fits(
            demand,
            [c for c in left if c.deadline is None or c.deadline > deadline],
            arithmetic,
            usable,
        )
    ]
    expected = helps[0] - now if helps else None
    assert admission.retry_after_ms == expected


def test_sglang_wants_more_room_than_it_needs() -> None:
    """At exact equality SGLang's arithmetic refuses and the allocator's admits."""
    protection = Protection()
    protection.hold(("a", "c"), (Run("x", 0, 10),), None)
    demand = Demand("b", 12, 8)
    assert check(demand, protection, SGLANG, 40 + 24, 0).feasibility is Feasibility.BLOCKED
    assert check(demand, protection, SGLANG, 40 + 25, 0).feasibility is Feasibility.FITS
    assert check(demand, protection, MICRO, 40 + 24, 0).feasibility is Feasibility.FITS
    assert check(demand, protection, MICRO, 40 + 20, 0).feasibility is Feasibility.BLOCKED


def test_output_counts_as_the_engine_estimates_it() -> None:
    """Ten thousand tokens of output weigh no more than the clipped estimate."""
    assert SGLANG.needed(100, 10_000) == 100 + 32 + 4
    assert Arithmetic().needed(100, 10_000) == 100 + 4096 + 1


def test_a_claim_on_the_requests_own_prefix_is_not_in_its_way() -> None:
    """Its tokens count once, and another's claim is named alone."""
    protection = Protection()
    protection.hold(("a", "mine"), (Run("x", 0, 10),), None)
    demand = Demand("a", 60, 0, (Run("x", 0, 10),))
    assert check(demand, protection, MICRO, 64, 0).feasibility is Feasibility.FITS
    protection.hold(("b", "other"), (Run("y", 0, 1),), 9_000)
    refused = check(demand, protection, MICRO, 64, 2_000)
    assert refused.blocking == (("b", "other"),)
    assert (refused.own, refused.others, refused.retry_after_ms) == ((), 1, 7_000)


@given(needed=st.integers(0, 400), room=st.integers(0, 100), strict=st.booleans())
def test_pages_fit_where_tokens_fit(needed: int, room: int, strict: bool) -> None:
    """A reader of pages comes to the engine's answer."""
    arithmetic = Arithmetic(4, strict=strict)
    tokens = arithmetic.shortfall(needed, 4 * room) > 0
    assert tokens is (arithmetic.shortfall(arithmetic.pages(needed), room) > 0)


def test_an_engine_may_reserve_less_than_a_page() -> None:
    """It takes slots one by one."""
    assert Arithmetic(16, reserve=1).needed(100, 20) == 121
    assert Arithmetic(16).needed(100, 20) == 136
