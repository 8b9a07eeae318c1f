"""The reuse of sessions behind SGLang's router, by routing policy, against the same engines direct.

Sessions whose policy shortens an old tool result on nearly every turn run against four embedded
engines: once through the proxy alone, and once for each policy through the proxy and the real
router (``sglang_router``). ``ratio`` is the share of the prompt tokens that no engine prefilled;
``points`` is its difference to that of the proxy alone, in percentage points. ``round_robin`` is
the control: it has no affinity, and must lose.
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import structlog

from .console import write_json
from .harness.arguments import Arguments, words
from .harness.report import show
from .stand_ins.router import POLICIES, TRUNCATE, Fleet, Reuse, fleet, measure, router

DIRECT = "direct"


def figures(found: Reuse, direct: Reuse, kinds: dict[str, int], seconds: float) -> dict[str, Any]:
    """Return one arm's figures, compared with those of the proxy alone."""
    return {
        "prompt": found.prompt,
        "ratio": round(found.ratio, 4),
        "points": round(100 * (found.ratio - direct.ratio), 2),
        "spliced": found.spliced,
        "answered": kinds,
        "seconds": round(seconds, 1),
    }


def run(engines: Fleet, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the figures of all arms, by name."""
    began = perf_counter()
    direct = measure(engines.proxy(), given.sessions, given.turns, tag=given.tag)
    found = {DIRECT: figures(direct, direct, {}, perf_counter() - began)}
    for name in given.policies:
        policy, _, threshold = name.partition(":")
        began = perf_counter()
        with router(
            policy, list(engines.origins.values()), cache_threshold=float(threshold or 0.3)
        ) as between:
            proxy = engines.proxy(between)
            # Texts of its own: no arm finds what another one has left.
            reuse = measure(proxy, given.sessions, given.turns, tag=f"{given.tag}-{name}")
            kinds = {kind: count for kind, count in proxy.kinds().items() if count}
        found[name] = figures(reuse, direct, kinds, perf_counter() - began)
    return found


def main() -> None:
    """Measure, print, write."""
    parser = Arguments(__doc__)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument(
        "--policies",
        type=words,
        default=",".join((*POLICIES, "cache_aware:0.01")),
        help="of the router; cache_aware:0.01 sets its --cache-threshold",
    )
    parser.add_argument("--tag", default="r", help="seeds the texts")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    with fleet(given.engines, policy=TRUNCATE) as engines:
        results = run(engines, given)
    rows = []
    for name, each in results.items():
        answered = ", ".join(f"{kind} {count}" for kind, count in sorted(each["answered"].items()))
        shares = (f"{each['ratio']:.1%}", f"{each['points']:+.2f}")
        rows.append((name, answered, *shares, each["spliced"]))
    show(("policy", "answered", "reused", "points", "spliced"), rows, words=2)
    write_json(given.json, results)
