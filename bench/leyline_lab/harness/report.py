"""Progress of a measurement on the way, and its figures as a table at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..tables import figures_table
from . import machine

_WIDEST = 400
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
    title: str = "",
    caption: str = "",
    words: int = 1,
) -> None:
    """Print a table, and the machine that its figures are of.

    Args:
        rows: cells by row; None leaves a line free.
        words: number of columns at the left that hold words; the others hold numbers.
    """
    table = figures_table(title, columns[:words], columns[words:], caption=caption)
    for row in rows:
        table.add_row(*map(str, row or ()))
    console = Console()
    # A table that is cut can't be read.
    whole = console.measure(table, options=console.options.update(max_width=_WIDEST))
    console.width = max(console.width, whole.maximum)
    console.print(table)
    console.print(machine.describe(), style="dim", highlight=False)
