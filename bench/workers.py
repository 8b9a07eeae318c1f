"""The throughput of a proxy by its number of workers, before the same idle upstream.

Agents continue sessions, turn after turn, on connections of their own. Proxies with different
numbers of workers take turns under the same load. The load and the upstream run on the machine's
cores, too: ``busy_cores`` says how much of the machine the proxy got, and ``rps_per_core`` what it
made of that, which is the figure to compare where there are no cores to spare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from leyline_proxy.render import ChatRenderer
from overhead.load import Load, Sample, Sessions, canned_answers, measure
from overhead.systems import System, canned_upstream, leyline
from proxy_turn import renderer_document

SIZES = {"1K": 1_000, "50K": 50_000, "100K": 100_000}
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


async def run(
    systems: Sequence[System], sessions: Sessions, load: Load, rounds: int
) -> dict[str, Sample]:
    """Return samples by system; within a round each has its turn."""
    samples = {each.name: Sample() for each in systems}
    for _ in range(rounds):
        for system in systems:
            samples[system.name].add(
                await measure(system.origin, load, sessions.make, system.cpu_s)
            )
    return samples


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--sizes", default="1K,50K", help="of the first prompts")
    parser.add_argument("--workers", default=f"1,{os.cpu_count() or 2}")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    counts = sorted({1, *(int(each) for each in given.workers.split(","))})
    console, results = Console(), dict[str, Any]()
    with console.status("Training the tokenizer"):
        document = renderer_document()
        renderer = ChatRenderer(**document)
        answers = canned_answers(renderer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document.json"
        path.write_text(json.dumps({"renderer": document, "answers": answers}))
        for name in given.sizes.split(","):
            sessions = Sessions(renderer, SIZES[name], [each["message"] for each in answers])
            load = Load(given.connections, TURNS[name])
            with ExitStack() as stack:
                upstream = stack.enter_context(canned_upstream(path))
                systems = [
                    stack.enter_context(
                        leyline(str(n), upstream.origin, Path(folder), LEYLINE_WORKERS=str(n))
                    )
                    for n in counts
                ]
                with console.status(f"{name}: {given.connections} agents, {given.rounds} rounds"):
                    samples = asyncio.run(run(systems, sessions, load, given.rounds))
            results[name] = {str(n): figures(samples[str(n)], samples["1"], n) for n in counts}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(results, indent=2) + "\n")
    shown = Table(
        "prompt", "workers", *next(iter(results["1K" if "1K" in results else name].values()))
    )
    for name, rows in results.items():
        for workers, row in rows.items():
            shown.add_row(name, workers, *map(str, row.values()))
    console.width = max(console.width, 140)  # a narrower table can't be read
    console.print(shown)


if __name__ == "__main__":
    main()
