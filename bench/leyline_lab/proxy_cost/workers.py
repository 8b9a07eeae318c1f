"""The throughput of a proxy by its number of workers, before the same idle upstream.

Agents continue sessions, turn after turn, on connections of their own. Proxies with different
numbers of workers take turns under the same load. The load and the upstream run on the machine's
cores, too: ``busy_cores`` says how much of the machine the proxy got, and ``rps_per_core`` what it
made of that, which is the figure to compare where there are no cores to spare.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack

from ..console import write_json
from ..harness.arguments import Arguments, numbers, words
from ..harness.report import progress, show
from .agent import renderer_document
from .load import Load, Sample, canned
from .overhead import SIZES, Cell, run
from .systems import leyline

TURNS = {"1K": 12, "50K": 8, "100K": 6}


def figures(sample: Sample, one: Sample, workers: int) -> dict[str, float]:
    """Return a system's figures, compared with those of one worker."""
    rps, of_one = (len(each.seconds) / each.wall_s for each in (sample, one))
    cpu, cpu_of_one = (each.cpu_s / len(each.seconds) for each in (sample, one))
    return {
        "rps": round(rps, 1),
        "cpu_ms_per_request": round(1e3 * cpu, 2),
        "busy_cores": round(sample.cpu_s / sample.wall_s, 2),
        "rps_per_core": round(1 / cpu, 1),
        "speed_up": round(rps / of_one, 2),
        "efficiency": round(rps / of_one / workers, 2),
        "cpu_efficiency": round(cpu_of_one / cpu, 2),
    }


def main() -> None:
    """Measure, print, write."""
    parser = Arguments(__doc__, required=True)
    parser.add_argument("--sizes", type=words, default="1K,50K", help="of the first prompts")
    parser.add_argument("--workers", type=numbers, default=f"1,{os.cpu_count() or 2}")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    counts = sorted({1, *given.workers})
    results: dict[str, dict[str, dict[str, float]]] = {}
    with canned(renderer_document()) as made:
        for name in given.sizes:
            cell = Cell("crowd", Load(given.connections, TURNS[name]))
            with ExitStack() as stack:
                upstream = stack.enter_context(made.upstream())
                systems = [
                    stack.enter_context(
                        leyline(str(n), upstream.origin, made.logs, LEYLINE_WORKERS=str(n))
                    )
                    for n in counts
                ]
                step = stack.enter_context(progress(name, given.rounds * len(systems)))
                sessions = made.sessions(SIZES[name])
                measured = run(upstream, systems, sessions, [cell], rounds=given.rounds, step=step)
                found = asyncio.run(measured)
            samples = {n: found[str(n)][cell.name] for n in counts}
            results[name] = {str(n): figures(samples[n], samples[1], n) for n in counts}
    write_json(given.json, results)
    rows = [(name, n, *row.values()) for name, each in results.items() for n, row in each.items()]
    columns = next(iter(next(iter(results.values())).values()))
    show(("prompt", "workers", *columns), rows)
