"""The result of a replay for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ..console import print_notes
from ..tables import figures_table, milliseconds, tokens
from .results import Arm, ArmRun, ReplayReport, summarise

MEANING = {
    Arm.OFF: "no cache (computed)",
    Arm.RADIX: "exact prefixes only",
    Arm.SPLICE: "Leyline",
}


class ArmProgress(AbstractContextManager["ArmProgress"]):
    """One progress bar per arm; call it with an arm and a number of requests done."""

    def __init__(self, console: Console, requests: int) -> None:
        self._requests = requests
        self._tasks: dict[Arm, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description:<7}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, arm: Arm, done: int) -> None:
        """Advance the bar of ``arm``; 0 only shows it."""
        if arm not in self._tasks:
            self._tasks[arm] = self._bars.add_task(arm.value, total=self._requests)
        self._bars.advance(self._tasks[arm], done)


def arms_table(runs: Mapping[Arm, ArmRun], title: str) -> Table:
    """Return one row per arm: tokens by source, hit ratio, time to the first token.

    Reuse has a column where an arm had it: a table of the others fits into 80 columns.
    """
    meanings = "; ".join(f"{arm.value}: {MEANING[arm]}" for arm in runs)
    totals = {arm: summarise(run) for arm, run in runs.items()}
    counted = ["requests", "prompt", "cached", "spliced", "prefilled"]
    if any(total.reused_tokens for total in totals.values()):
        counted.insert(-1, "reused")
    figures = (*counted, "hit\nratio", "TTFT\np50", "TTFT\np90")
    table = figures_table(title, ("arm",), figures, caption=meanings)
    for arm, total in totals.items():
        counts = {"requests": total.requests} | {
            name: getattr(total, f"{name}_tokens") for name in counted[1:]
        }
        table.add_row(
            arm.value,
            *(tokens(count) for count in counts.values()),
            f"{total.hit_ratio:.1%}",
            milliseconds(total.ttft_p50_ms),
            milliseconds(total.ttft_p90_ms),
        )
    return table


def print_report(console: Console, report: ReplayReport, title: str) -> None:
    """Print the table, then reuse of the unchanged tokens, outcomes and notes."""
    console.print(arms_table(report.runs, title))
    for arm, run in report.runs.items():
        ratio = report.reuse_of_unchanged(arm)
        outcomes = summarise(run).outcomes
        told = ", ".join(f"{reason} {count}" for reason, count in outcomes.items())
        share = "nothing was unchanged" if ratio is None else f"{ratio:.4f} reused"
        rounding = report.rounding(arm) if arm is not Arm.OFF else 0
        beyond = report.reuse_without_rounding(arm)
        pages = (
            f" ({beyond:.4f} without {rounding:,} that whole pages of {report.pages.tokens} cost)"
            if rounding and beyond is not None
            else ""
        )
        console.print(
            f"{arm.value:<7} {share} of {report.unchanged_tokens:,} unchanged tokens{pages}"
            + (f"; edited requests: {told}" if told else ""),
            highlight=False,
        )
    print_notes(console, notes_of(report.runs))


def notes_of(runs: Mapping[Arm, ArmRun]) -> list[str]:
    """Return a line for each session that ended early."""
    return [note for run in runs.values() for note in run.notes]


def comparison(runs: Mapping[Arm, ArmRun]) -> str:
    """Return one sentence on the effect of splicing; empty without both real arms."""
    if Arm.RADIX not in runs or Arm.SPLICE not in runs:
        return ""
    before, after = summarise(runs[Arm.RADIX]), summarise(runs[Arm.SPLICE])
    text = (
        f"The same requests, the same edits: Leyline reused {after.hit_ratio:.1%} of the prompt "
        f"tokens, a prefix cache {before.hit_ratio:.1%}"
    )
    if before.ttft_p50_ms and after.ttft_p50_ms:
        text += (
            f"; the median first token came after {milliseconds(after.ttft_p50_ms)} instead of "
            f"{milliseconds(before.ttft_p50_ms)}"
        )
    return text + "."
