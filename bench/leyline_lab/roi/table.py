"""The estimate for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..policy_trial.table import tokens
from ..tables import figures_table
from .results import RoiReport, Served, advice

_MEANING = (
    "prefix: exact beginnings; edits: spliced after edits; reuse: the same content elsewhere; "
    "prefill: computed. All in % of the prompt tokens."
)
_NOTES = 8
"""Largest number of notes shown."""


def print_roi(console: Console, report: RoiReport) -> None:
    """Print a row per file, their sum, the kinds of reuse, and the advice."""
    served = report.served
    console.print(_table(report))
    if served.reuse:
        console.print(kinds(served), highlight=False)
    console.print(advice(served), highlight=False)


def kinds(served: Served) -> str:
    """Return in one sentence what the KV of the reused tokens has read."""
    clean, session, tenant = (count / served.reuse for count in served.by_kind().values())
    return (
        f"Of the reuse, {clean:.1%} is clean (its KV has read only what the prompt begins with), "
        f"{session:.1%} has read other text of the session, {tenant:.1%} another session's."
    )


def print_notes(console: Console, report: RoiReport) -> None:
    """Print which requests are left out."""
    notes = [f"{file.name}: {note}" for file in report.files for note in file.notes]
    for note in notes[:_NOTES]:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    if len(notes) > _NOTES:
        console.print(f"note: {len(notes) - _NOTES} more", style="yellow", highlight=False)


def _table(report: RoiReport) -> Table:
    figures = ("requests", "prompt", *Served().by_source())
    table = figures_table("", ("file",), figures, caption=_MEANING)
    table.columns[0].overflow, table.columns[0].max_width = "ellipsis", 28
    for file in report.files:
        table.add_row(escape(file.name), *_cells(file.requests, file.served))
    if len(report.files) > 1:
        table.add_section()
        requests = sum(file.requests for file in report.files)
        table.add_row(f"all {len(report.files)} files", *_cells(requests, report.served))
    return table


def _cells(requests: int, served: Served) -> list[str]:
    shares = (f"{100 * served.share(count):.1f}" for count in served.by_source().values())
    return [f"{requests:,}", tokens(served.prompt), *shares]
