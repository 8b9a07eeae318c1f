"""The cost of the admission check for a request while many claims are live."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.table import Table

from leyline_engine.claims.book import ClaimBook
from leyline_engine.claims.events import EventLedger, Run
from leyline_engine.claims.feasibility import Arithmetic, Demand, Feasibility
from leyline_engine.claims.limits import Limits
from leyline_engine.contract import Claim, ClaimKind, Predicate

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


def timed(work: Callable[[], object], repeat: int) -> list[float]:
    """Return the microseconds of each call."""
    found = []
    for _ in range(repeat):
        started = time.perf_counter_ns()
        work()
        found.append((time.perf_counter_ns() - started) / 1000)
    return found


def come_and_go(book: ClaimBook, revisions: count[int], *, one_source: bool) -> None:
    """End one of the claims, and enter it again."""
    claim = claim_of(0, one_source=one_source, revision=next(revisions))
    book.release(claim.tenant, claim.id)
    hold(book, claim)


def figures(times: list[float]) -> dict[str, float]:
    """Return median and 99th percentile."""
    return {"p50_us": statistics.median(times), "p99_us": statistics.quantiles(times, n=100)[98]}


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
            found[f"{name}; claims {where}"] = figures(timed(partial(book.check, demand), repeat))
        work = partial(come_and_go, book, count(2), one_source=one_source)
        found[f"a claim goes and comes; {where}"] = figures(timed(work, max(10, repeat // 20)))
    return found


def main() -> None:
    """Run from the command line; ends with 1 if a check takes longer than the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--claims", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=2000)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    found = measure(options.claims, options.repeat)
    table = Table(title=f"{options.claims:,} live claims; goal: a check within {GOAL_US:.0f} µs")
    for name in ("", "median, µs", "p99, µs"):
        table.add_column(name, justify="right" if name else "left")
    for name, row in found.items():
        table.add_row(name, f"{row['p50_us']:,.1f}", f"{row['p99_us']:,.1f}")
    Console().print(table)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    checks = [row["p50_us"] for name, row in found.items() if "goes and comes" not in name]
    raise SystemExit(max(checks) > GOAL_US)


if __name__ == "__main__":
    main()
