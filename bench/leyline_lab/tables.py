"""Tables of figures for a terminal, and the texts of their cells."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table


def figures_table(
    title: str,
    labels: Sequence[str],
    figures: Sequence[str],
    *,
    caption: str = "",
    gap: int = 1,
) -> Table:
    """Return a table without rows.

    Args:
        labels: names of the first columns, aligned left.
        figures: names of the others, aligned right.
        gap: blanks after each cell, beside the one that separates columns.
    """
    table = Table(
        title=escape(title) or None,
        title_justify="left",
        title_style="bold",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, gap, 0, 0),
        pad_edge=False,
    )
    for name in labels:
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def met(reached: bool) -> str:
    """Return the verdict on a goal."""
    return "met" if reached else "NOT MET"


def tokens(count: int) -> str:
    """Return a number for a cell; millions are shortened to fit a row into 80 columns."""
    return f"{count:,}" if count < 1_000_000 else f"{count / 1_000_000:,.2f} M"


def whole(value: float | None) -> str:
    """Return a rounded number; empty if it wasn't measured."""
    return "" if value is None else f"{value:,.0f}"


def share(value: float | None, *, nothing: str = "") -> str:
    """Return a share in per cent; ``nothing`` if it wasn't measured."""
    return nothing if value is None else f"{value:.1%}"


def milliseconds(value: float | None) -> str:
    """Return a duration."""
    if value is None:
        return "–"
    return f"{value:,.0f} ms" if value < 1000 else f"{value / 1000:,.2f} s"
