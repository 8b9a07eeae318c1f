"""An estimate for readers: a table, and a picture of prompt tokens by source, file and turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..pictures import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PINK,
    frame,
    headline,
    legend_below,
    new_figure,
    save_figure,
    stacked_bars,
)
from ..policy_trial.report import tokens
from ..tables import figures_table
from .results import RoiReport, Served, advice, by_turn

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


COLOURS = {"prefix": BLUE, "edits": GREEN, "reuse": PINK, "prefill": ORANGE}
LABELS = {
    "prefix": "exact prefix",
    "edits": "spliced after edits",
    "reuse": "content reuse",
    "prefill": "prefilled",
}
_MOST_LETTERS = 30


def draw_roi(report: RoiReport, out: Path, title: str) -> None:
    """Write a PNG, SVG or PDF, by the suffix of ``out``.

    Raises:
        ValueError: a suffix of another kind.
    """
    rows = [(file.name, file.served) for file in report.files]
    if len(rows) > 1:
        rows.append(("all files", report.served))
    height = max(4.2, 1.8 + 0.42 * len(rows))
    figure = new_figure(12.5, height)
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    _draw_files(left, rows)
    _draw_turns(right, by_turn(report))
    legend_below(figure, left, 4)
    headline(figure, title)
    save_figure(figure, out)


def _draw_files(panel: Any, rows: Sequence[tuple[str, Served]]) -> None:
    places = range(len(rows))
    base = [0.0] * len(rows)
    for source, colour in COLOURS.items():
        widths = [100 * served.share(served.by_source()[source]) for _, served in rows]
        panel.barh(places, widths, left=base, height=0.74, color=colour, label=LABELS[source])
        for place, start, width in zip(places, base, widths, strict=True):
            if width >= 5:
                dark = source in ("prefix", "edits")
                panel.text(
                    start + width / 2,
                    place,
                    f"{width:.0f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if dark else INK,
                )
        base = [start + width for start, width in zip(base, widths, strict=True)]
    for place, (_, served) in enumerate(rows):
        gain = f"+{100 * served.share(served.reuse):.1f} reuse"
        panel.text(101, place, gain, va="center", fontsize=9, color=INK, clip_on=False)
    panel.set_yticks(places, [_short(name) for name, _ in rows])
    panel.set_ylim(max(len(rows), 4) - 0.4, -0.6)  # from the top, no bar too thick
    panel.set_xlim(0, 100)
    panel.set_xlabel("% of the prompt tokens", color=INK)
    frame(panel, "By file", grid=False)


def _draw_turns(panel: Any, turns: Sequence[Served]) -> None:
    places = [place + 1 for place in range(len(turns))]
    layers = {
        source: [100 * turn.share(turn.by_source()[source]) for turn in turns] for source in COLOURS
    }
    width = 1.0 if len(turns) > 40 else 0.86
    stacked_bars(panel, places, layers, colours=COLOURS, labels=LABELS, width=width)
    panel.set_ylim(0, 100)
    panel.set_xlabel("turn", color=INK)
    panel.set_ylabel("% of the prompt tokens", color=INK)
    frame(panel, "By turn, all sessions together", grid=False)


def _short(name: str) -> str:
    stem = name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    return stem if len(stem) <= _MOST_LETTERS else f"{stem[: _MOST_LETTERS - 1]}…"
