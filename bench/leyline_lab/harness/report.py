"""Progress of a measurement on the way, and its figures as a table at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..tables import figures_table
from . import machine

Step = Callable[..., None]
"""Counts one step; a text that it is given describes the next one."""


@contextmanager
def progress(what: str, total: float) -> Iterator[Step]:
    """Show a bar on standard error until the end."""
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)

        def step(text: str | None = None, advance: float = 1) -> None:
            bars.update(task, advance=advance, description=text)

        yield step


def show(
    columns: Sequence[str],
    rows: Iterable[Sequence[object] | None],
    *,
    title: str | None = None,
    caption: str | None = None,
    words: int = 1,
    width: int = 0,
) -> None:
    """Print a table, and the machine that its figures are of.

    Args:
        rows: cells by row; None draws a line.
        words: number of columns at the left that hold words; the others hold numbers.
        width: least width in characters; a narrower table can't be read.
    """
    table = figures_table(title or "", columns[:words], columns[words:], caption=caption or "")
    for column in table.columns[1:]:
        column.no_wrap = False
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*map(str, row))
    console = Console()
    console.width = max(console.width, width)
    console.print(table)
    console.print(machine.describe(), style="dim", highlight=False)
