"""The cost of a proxy to a request: Leyline, LiteLLM, nginx, none; before one idle upstream.

Agents continue sessions of a size, turn after turn, through each system in turn. The upstream
answers from canned bytes, so that only the proxies are measured. It shares the machine's cores with
them and with the load, so the CPU time of the proxy's own processes decides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from leyline_proxy.render import ChatRenderer
from overhead.load import Load, Sample, Sessions, canned_answers, measure
from overhead.report import draw, table
from overhead.systems import (
    BENCH_VENV,
    System,
    nginx_found,
    requests_of,
    running,
    set_pause,
    set_up,
)
from proxy_turn import renderer_document

SIZES = {"1K": 1_000, "50K": 50_000, "100K": 100_000}
FEW, MANY = 16, 512
"""Chunks of the streams whose difference gives the cost of a chunk."""
PACE_US, PACED = 1000, 272
"""Microseconds between chunks of streams in which each arrives by itself, and their number."""


@dataclass(frozen=True)
class Cell:
    """One load, and the name of its figures in the detail."""

    name: str
    load: Load
    pace_us: int = 0


def cells(tokens: int, crowds: Sequence[int], *, quick: bool) -> list[Cell]:
    """Return the loads of one size. A session grows by its turns, a short one much: it has few."""
    short = tokens < 10_000
    turns, sessions = (4, 5) if short else (20, 1)
    if quick:
        turns, sessions = min(turns, 8), min(sessions, 2)
    found = [
        Cell("1", Load(1, turns, sessions)),
        Cell("1 few", Load(1, turns, sessions, stream=True, chunks=FEW)),
        Cell("1 many", Load(1, turns, sessions, stream=True, chunks=MANY)),
        Cell("1 few paced", Load(1, 4, stream=True, chunks=FEW), PACE_US),
        Cell("1 many paced", Load(1, 4, stream=True, chunks=PACED), PACE_US),
    ]
    for crowd in crowds[:1] if quick else crowds:
        each = 4 if crowd == crowds[0] else 2
        found.append(Cell(f"{crowd}", Load(crowd, each)))
        found.append(Cell(f"{crowd} streamed", Load(crowd, each, stream=True, chunks=FEW)))
    return found


async def run(
    systems: Sequence[System],
    sessions: Sessions,
    plan: Sequence[Cell],
    rounds: int,
    step: Callable[[str], None],
) -> dict[str, dict[str, Sample]]:
    """Return samples by system and cell; within a round each system has its turn: ABAB."""
    samples: dict[str, dict[str, Sample]] = {each.name: {} for each in systems}
    for cell in plan:
        set_pause(systems[0], cell.pace_us)
        for _ in range(rounds):
            for system in systems:
                step(f"{cell.name}, {system.name}")
                before = requests_of(systems[0])
                found = await measure(system.origin, cell.load, sessions.make, system.cpu_s)
                found.upstream_requests = requests_of(systems[0]) - before
                samples[system.name].setdefault(cell.name, Sample()).add(found)
    return samples


def p99(seconds: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return quantiles(seconds, n=100, method="inclusive")[98]


def figures_of(sample: Sample, direct: Sample) -> dict[str, float]:
    """Return the figures of one cell; the overhead is over the same load without a proxy."""
    return {
        "cpu_ms_per_request": round(1e3 * sample.cpu_s / len(sample.seconds), 3),
        "rps": round(len(sample.seconds) / sample.wall_s, 1),
        "added_p50_ms": round(1e3 * (median(sample.seconds) - median(direct.seconds)), 3),
        "added_p99_ms": round(1e3 * (p99(sample.seconds) - p99(direct.seconds)), 3),
        "opening_cpu_ms": round(1e3 * sample.opening_cpu_s / sample.sessions, 3),
        "requests": len(sample.seconds),
        "upstream_requests_per_turn": round(
            sample.upstream_requests / (len(sample.seconds) + sample.sessions), 2
        ),
    }


def us_per_chunk(few: Sample, many: Sample, chunks: int) -> float:
    """Return the CPU µs of each of a request's ``chunks`` further chunks."""
    more = many.cpu_s / len(many.seconds) - few.cpu_s / len(few.seconds)
    return round(1e6 * more / chunks, 2)


def figures(
    samples: Mapping[str, Mapping[str, Sample]], rss_mb: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Return the figures of one size by system."""
    found: dict[str, dict[str, Any]] = {}
    for system, own in samples.items():
        detail = {name: figures_of(sample, samples["direct"][name]) for name, sample in own.items()}
        head = dict(detail["1"])
        del head["opening_cpu_ms"], head["requests"]
        found[system] = {
            **head,
            "cpu_us_per_chunk": us_per_chunk(own["1 few"], own["1 many"], MANY - FEW),
            "rss_mb": round(rss_mb[system], 1),
            "detail": {
                "loads": detail,
                "cpu_us_per_paced_chunk": us_per_chunk(
                    own["1 few paced"], own["1 many paced"], PACED - FEW
                ),
            },
        }
    return found


def run_all(given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure every size."""
    rounds = 1 if given.quick else given.rounds
    sizes = {name: SIZES[name] for name in given.sizes.split(",")}
    crowds = [int(crowd) for crowd in given.crowds.split(",")]
    with console.status("Training the tokenizer"):
        document = renderer_document()
        renderer = ChatRenderer(**document)
        answers = canned_answers(renderer)
    results: dict[str, Any] = {}
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, console=console) as progress,
    ):
        path = Path(folder) / "document.json"
        path.write_text(json.dumps({"renderer": document, "answers": answers}))
        for name, tokens in sizes.items():
            sessions = Sessions(renderer, tokens, [each["message"] for each in answers])
            plan = cells(tokens, crowds, quick=given.quick)
            # Fresh processes for each size, so that their memory is that of the size.
            compared = {"litellm": not given.without_litellm, "asked": given.receipts}
            loops, nginx = given.loops.split(), nginx_found()
            with running(path, **compared, loops=loops, nginx=nginx) as systems:
                task = progress.add_task(name, total=len(plan) * rounds * len(systems))

                def step(what: str, task: Any = task, name: str = name) -> None:
                    progress.update(task, advance=1, description=f"{name}: {what}")

                samples = asyncio.run(run(systems, sessions, plan, rounds, step))
                results[name] = figures(samples, {each.name: each.rss_mb() for each in systems})
    return results


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="figures by size and system")
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    parser.add_argument("--sizes", default=",".join(SIZES), help="of the first prompts")
    parser.add_argument("--crowds", default="16,64", help="connections at once, beside one")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system per load")
    parser.add_argument("--quick", action="store_true", help="one round, fewer loads and turns")
    parser.add_argument("--without-litellm", action="store_true")
    parser.add_argument(
        "--receipts", action="store_true", help="also with an engine that is asked for its receipts"
    )
    parser.add_argument("--loops", default="", help="also on these event loops: 'asyncio uvloop'")
    parser.add_argument("--setup", action="store_true", help=f"install LiteLLM into {BENCH_VENV}")
    given = parser.parse_args()
    if given.setup:
        set_up()
        if given.json is None:
            return
    if given.json is None:
        parser.error("say where the figures go: --json OUT")
    if not given.without_litellm and not (BENCH_VENV / "bin" / "litellm").exists():
        parser.error("LiteLLM isn't installed: run with --setup first, or --without-litellm")
    console = Console()
    results = run_all(given, console)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(results, indent=2) + "\n")
    if given.plot:
        draw(results, given.plot)
    console.width = max(console.width, 120)  # a narrower table can't be read
    console.print(table(results))


if __name__ == "__main__":
    main()
