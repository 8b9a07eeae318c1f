"""The cost of a proxy to a request: Leyline, LiteLLM, nginx, none; before one idle upstream.

Agents continue sessions of a size, turn after turn, through each system in turn. The upstream
answers from canned bytes, so that only the proxies are measured. It shares the machine's cores with
them and with the load, so the CPU time of the proxy's own processes decides.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..console import write_json
from ..harness.arguments import Arguments, numbers, words
from ..harness.report import Step, progress, show
from ..harness.statistics import percentile
from ..pictures import new_figure, save_figure
from .agent import renderer_document
from .load import Canned, Load, Sample, Sessions, canned, measure
from .systems import BENCH_VENV, System, leyline, litellm, nginx, nginx_found, set_pause, set_up
from .upstream import ASKED

SIZES = {"1K": 1_000, "50K": 50_000, "100K": 100_000}
FEW, MANY = 16, 512
"""Chunks of the streams whose difference gives the cost of a chunk."""
PACE_US, PACED = 1000, 272
"""Microseconds between chunks of streams in which each arrives by itself, and their number."""
_COLORS = {
    "leyline": "#1f77b4",
    "leyline asks": "#9ecae1",
    "litellm": "#d62728",
    "nginx": "#2ca02c",
}
_KINDS = {
    "cpu_ms_per_request": "CPU ms per request",
    "added_p50_ms": "added latency, p50, ms",
    "added_p99_ms": "added latency, p99, ms",
    "cpu_us_per_chunk": "CPU µs per streamed chunk",
}
"""Titles of the picture's parts."""


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
    upstream: System,
    systems: Sequence[System],
    sessions: Sessions,
    plan: Sequence[Cell],
    *,
    rounds: int,
    step: Step,
) -> dict[str, dict[str, Sample]]:
    """Return samples by system and cell; within a round each system has its turn: ABAB."""
    samples: dict[str, dict[str, Sample]] = {each.name: {} for each in systems}
    for cell in plan:
        set_pause(upstream, cell.pace_us)
        for _ in range(rounds):
            for system in systems:
                found = await measure(system, upstream, cell.load, sessions)
                samples[system.name].setdefault(cell.name, Sample()).add(found)
                step(f"{cell.name}, {system.name}")
    return samples


def figures_of(sample: Sample, direct: Sample) -> dict[str, float]:
    """Return the figures of one cell; the overhead is over the same load without a proxy."""

    def added_ms(share: float) -> float:
        own, floor = (percentile(each.seconds, share) for each in (sample, direct))
        return round(1e3 * (own - floor), 3)

    requests = len(sample.seconds)
    return {
        "cpu_ms_per_request": round(1e3 * sample.cpu_s / requests, 3),
        "rps": round(requests / sample.wall_s, 1),
        "added_p50_ms": added_ms(0.5),
        "added_p99_ms": added_ms(0.99),
        "opening_cpu_ms": round(1e3 * sample.opening_cpu_s / sample.sessions, 3),
        "requests": requests,
        "upstream_requests_per_turn": round(
            sample.upstream_requests / (requests + sample.sessions), 2
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
        paced = us_per_chunk(own["1 few paced"], own["1 many paced"], PACED - FEW)
        found[system] = {
            **head,
            "cpu_us_per_chunk": us_per_chunk(own["1 few"], own["1 many"], MANY - FEW),
            "rss_mb": round(rss_mb[system], 1),
            "detail": {"loads": detail, "cpu_us_per_paced_chunk": paced},
        }
    return found


def opened(stack: ExitStack, made: Canned, given: argparse.Namespace) -> list[System]:
    """Start the upstream, which is also ``direct``, and the proxies before it."""
    upstream = stack.enter_context(made.upstream())
    url, logs = upstream.origin, made.logs
    proxies = [leyline("leyline", url, logs)]
    if given.receipts:
        proxies.append(leyline("leyline asks", url + ASKED, logs))
    proxies += [leyline(loop, url, logs, LEYLINE_LOOP=loop) for loop in given.loops.split()]
    if not given.without_litellm:
        proxies.append(litellm(url, logs))
    if program := nginx_found():
        proxies.append(nginx(program, url, logs))
    return [upstream, *map(stack.enter_context, proxies)]


def run_all(given: argparse.Namespace) -> dict[str, Any]:
    """Measure every size."""
    rounds = 1 if given.quick else given.rounds
    results: dict[str, Any] = {}
    with canned(renderer_document()) as made:
        for name in given.sizes:
            plan = cells(SIZES[name], given.crowds, quick=given.quick)
            # Fresh processes for each size, so that their memory is that of the size.
            with ExitStack() as stack:
                systems = opened(stack, made, given)
                step = stack.enter_context(progress(name, len(plan) * rounds * len(systems)))
                sessions = made.sessions(SIZES[name])
                samples = asyncio.run(
                    run(systems[0], systems, sessions, plan, rounds=rounds, step=step)
                )
                results[name] = figures(samples, {each.name: each.rss_mb() for each in systems})
    return results


def rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str] | None]:
    """Yield the figures of one connection, not streamed, and of chunks."""
    for size, systems in results.items():
        for system, entry in systems.items():
            detail = entry["detail"]
            yield [
                system,
                size,
                f"{entry['cpu_ms_per_request']:.2f}",
                f"{entry['added_p50_ms']:.2f}",
                f"{entry['added_p99_ms']:.2f}",
                f"{entry['rps']:.0f}",
                f"{entry['upstream_requests_per_turn']:.2f}",
                f"{entry['cpu_us_per_chunk']:.1f}",
                f"{detail['cpu_us_per_paced_chunk']:.1f}",
                f"{detail['loads']['1']['opening_cpu_ms']:.1f}",
                f"{entry['rss_mb']:.0f}",
            ]
        yield None


COLUMNS = (
    *("system", "tokens", "CPU ms", "added p50 ms", "added p99 ms", "requests/s"),
    *("upstream requests", "CPU µs/chunk", "µs/paced chunk", "opening CPU ms", "RSS MB"),
)


def draw(results: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Draw CPU time, added latency and the cost of chunks, by size."""
    figure = new_figure(11, 4)
    systems = [each for each in _COLORS if any(each in entry for entry in results.values())]
    width = 0.8 / len(systems)
    for axes, (name, title) in zip(figure.subplots(1, len(_KINDS)), _KINDS.items(), strict=True):
        for number, system in enumerate(systems):
            heights = [max(entry[system][name], 0) for entry in results.values()]
            places = [at + (number - (len(systems) - 1) / 2) * width for at in range(len(heights))]
            bars = axes.bar(places, heights, width, label=system, color=_COLORS[system])
            axes.bar_label(bars, fmt="%.3g", fontsize=7)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(len(results)), list(results))
        axes.set_yscale("log")
        axes.margins(y=0.15)
        # The bars have labels.
        axes.tick_params(axis="y", which="both", left=False, labelleft=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.supxlabel("prompt tokens; the bars' heights are logarithmic", fontsize=9)
    figure.axes[0].legend(fontsize=8)
    save_figure(figure, out)


def main() -> None:
    """Measure, print, write."""
    parser = Arguments(__doc__, plot=True)
    parser.add_argument("--sizes", type=words, default=",".join(SIZES), help="of the first prompts")
    parser.add_argument(
        "--crowds", type=numbers, default="16,64", help="connections at once, beside one"
    )
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
    results = run_all(given)
    write_json(given.json, results)
    if given.plot:
        draw(results, given.plot)
    title = "One connection, not streamed; a direct request's CPU is the upstream's"
    show(COLUMNS, rows(results), title=title)
