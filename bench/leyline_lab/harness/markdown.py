"""Tables in pages of the documentation, each between the mark of its command and an end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

END = "<!-- end of the table -->"


def mark(command: str) -> str:
    """Return the line above the table that a command writes."""
    return f"<!-- python -m leyline_lab {command} -->"


def row(cells: Iterable[object]) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(columns: Sequence[str], rows: Iterable[Iterable[object]], *, words: int = 1) -> str:
    """Return a table.

    Args:
        words: number of columns at the left that hold words; the others hold numbers.
    """
    kinds = "".join("---|" if at < words else "---:|" for at in range(len(columns)))
    return "\n".join([row(columns), f"|{kinds}", *map(row, rows)])


def shown(document: str, begin: str) -> str:
    """Return what a page shows between a mark and the next end."""
    return document.partition(begin)[2].partition(END)[0]


def put_into(document: str, text: str, begin: str) -> str:
    """Return ``document`` with ``text`` between a mark and the next end.

    Raises:
        ValueError: it has no such marks.
    """
    before, found, rest = document.partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"the document has no marks {begin} and {END}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def write(text: str, page: Path | None, begin: str) -> None:
    """Print a table, or put it into a page."""
    if page is None:
        print(text)
        return
    page.write_text(put_into(page.read_text("utf-8"), text, begin), "utf-8")
