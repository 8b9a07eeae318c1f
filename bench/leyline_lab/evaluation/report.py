"""The report of an evaluation as one page that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from .charts import chart_svg

_ABSENT = "–"


def render_report(document: Mapping[str, Any]) -> str:
    """Return the page of an evaluation's JSON.

    Raises:
        MissingExtraError: matplotlib isn't installed.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    source = files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    tables = [
        {
            "name": name,
            **table,
            "svg": chart_svg(table["chart"]) if table["chart"] else "",
            **dict(zip(("columns", "rows"), shown_cells(table), strict=True)),
        }
        for name, table in document["tables"].items()
    ]
    return environment.from_string(source).render(document=document, tables=tables)


def shown_cells(table: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return columns and cells as text, each value with its interval in one cell."""
    columns: Sequence[str] = table["columns"]
    kept = [index for index, name in enumerate(columns) if not _is_bound(columns, name)]
    rows = [[_with_bounds(columns, row, index) for index in kept] for row in table["rows"]]
    return [columns[index] for index in kept], rows


def _is_bound(columns: Sequence[str], name: str) -> bool:
    stem = name.removesuffix(" low").removesuffix(" high")
    return stem != name and stem in columns


def _with_bounds(columns: Sequence[str], row: Sequence[Any], index: int) -> str:
    text = _cell(row[index])
    bounds = [f"{columns[index]} low", f"{columns[index]} high"]
    if row[index] is None or not set(bounds) <= set(columns):
        return text
    low, high = (_cell(row[columns.index(name)]) for name in bounds)
    return f"{text} ({low} to {high})"


def _cell(value: Any) -> str:
    if value is None:
        return _ABSENT
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)
