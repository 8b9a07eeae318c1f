"""The cost of the admission check for a request while many claims are live."""

from __future__ import annotations

from functools import partial
from itertools import count
from statistics import median

from leyline_engine.claims.book import ClaimBook
from leyline_engine.claims.events import EventLedger, Run
from leyline_engine.claims.feasibility import Arithmetic, Demand, Feasibility
from leyline_engine.claims.limits import Limits
from leyline_engine.contract import Claim, ClaimKind, Predicate

from ..console import write_json
from ..harness.arguments import Arguments
from ..harness.report import show
from ..harness.statistics import percentile, times

GOAL_US = 50.0
PAGE, SPAN, TENANTS = 16, 64, 10
LIMITS = Limits(claims=10**6, tokens=10**12, share=9, engine_claims=10**6, engine_share=9)
"""Limits for claims that overlap and each count in full; together they may exceed the pool."""


def claim_of(number: int, *, one_source: bool, revision: int = 1) -> Claim:
    """Return a claim of its own source; or over one source, from the last one's middle on."""
    start = number * SPAN // 2 if one_source else 0
    return Claim(
        id=f"c{number}",
        tenant=f"t{number % TENANTS}",
        session="s",
        kind=ClaimKind.HARD,
        predicate=Predicate(
            "one" if one_source else f"s{number}", start * PAGE, (start + SPAN) * PAGE
        ),
        ttl_s=None if number % 3 == 0 else 60 + number,
        revision=revision,
    )


def hold(book: ClaimBook, claim: Claim) -> None:
    """Enter a claim whose pages are all resident."""
    book.submit(claim, claim.predicate.end)
    first, end = claim.predicate.page_span(PAGE)
    book.seek((claim.tenant, claim.id), [Run(claim.predicate.source, first, end)])


def filled(claims: int, *, one_source: bool) -> ClaimBook:
    """Return a book whose live claims leave 1,000 pages."""
    pages = (claims + 1) * SPAN // 2 if one_source else claims * SPAN
    book = ClaimBook(pages + 1000, Arithmetic(PAGE), EventLedger(), limits=LIMITS)
    for number in range(claims):
        hold(book, claim_of(number, one_source=one_source))
    return book


def come_and_go(book: ClaimBook, revisions: count[int], *, one_source: bool) -> None:
    """End one of the claims, and enter it again."""
    claim = claim_of(0, one_source=one_source, revision=next(revisions))
    book.release(claim.tenant, claim.id)
    hold(book, claim)


def figures(seconds: list[float]) -> dict[str, float]:
    """Return median and 99th percentile."""
    return {"p50_us": 1e6 * median(seconds), "p99_us": 1e6 * percentile(seconds, 0.99)}


def measure(claims: int, repeat: int) -> dict[str, dict[str, float]]:
    """Measure the check by situation, and a claim that comes and goes."""
    found: dict[str, dict[str, float]] = {}
    for one_source in (False, True):
        where = "over one source" if one_source else "of many sources"
        book = filled(claims, one_source=one_source)
        source = "one" if one_source else f"s{claims // 2}"
        for name, demand, expected in (
            ("fits", Demand("t1", 4_000, 1_000), Feasibility.FITS),
            ("blocked", Demand("t1", 40_000, 1_000), Feasibility.BLOCKED),
            (
                "blocked, one claim its own prefix's",
                Demand("t1", 40_000, 1_000, (Run(source, 0, SPAN),)),
                Feasibility.BLOCKED,
            ),
        ):
            assert book.check(demand).feasibility is expected
            found[f"{name}; claims {where}"] = figures(times(partial(book.check, demand), repeat))
        work = partial(come_and_go, book, count(2), one_source=one_source)
        found[f"a claim goes and comes; {where}"] = figures(times(work, max(10, repeat // 20)))
    return found


def main() -> int:
    """Measure, print, write; returns 1 if a check takes longer than the goal."""
    parser = Arguments(__doc__)
    parser.add_argument("--claims", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=2000)
    given = parser.parse_args()
    found = measure(given.claims, given.repeat)
    title = f"{given.claims:,} live claims; goal: a check within {GOAL_US:.0f} µs"
    rows = [(name, f"{row['p50_us']:,.1f}", f"{row['p99_us']:,.1f}") for name, row in found.items()]
    show(("", "median, µs", "p99, µs"), rows, title=title)
    write_json(given.json, found)
    checks = [row["p50_us"] for name, row in found.items() if "goes and comes" not in name]
    return int(max(checks) > GOAL_US)
