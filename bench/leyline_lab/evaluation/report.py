"""The report of an evaluation as one page that loads nothing from elsewhere, with its charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from io import StringIO
from typing import Any

from jinja2 import Environment, StrictUndefined

from ..pictures import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, frame, new_figure

_ABSENT = "–"


def render_report(document: Mapping[str, Any]) -> str:
    """Return the page of an evaluation's JSON."""
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


_COLOURS = (BLUE, GREEN, ORANGE, SKY, PINK, RED)
_WIDTH, _HEIGHT, _HIGHER = 9.0, 4.2, 5.6
_BAR_GROUP = 0.8
_MANY = 6
"""Number of labels from which on they are turned."""


def chart_svg(chart: Mapping[str, Any]) -> str:
    """Return a chart as an ``<svg>`` element.

    Args:
        chart: a chart as JSON; see :class:`~leyline_lab.fidelity.experiment.Chart`.
    """
    labels = [str(label) for label in chart["x"]]
    figure = new_figure(_WIDTH, _HEIGHT if len(labels) <= _MANY else _HIGHER)
    import matplotlib

    panel = figure.subplots()
    draw = _bars if chart["kind"] == "bar" else _lines
    draw(panel, chart)
    panel.set_xlabel(chart["x_label"], color=INK)
    panel.set_ylabel(chart["y_label"], color=INK)
    frame(panel, size=8)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9)
    out = StringIO()
    # Text stays text; ids depend on the chart alone, so equal reports are equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": str(chart)}):
        figure.savefig(out, format="svg", metadata={"Date": None}, facecolor="white")
    text = out.getvalue()
    return text[text.index("<svg") :]


def _bars(panel: Any, chart: Mapping[str, Any]) -> None:
    series = chart["series"]
    width = _BAR_GROUP / max(1, len(series))
    places = range(len(chart["x"]))
    for index, (name, values) in enumerate(series.items()):
        at = [place - _BAR_GROUP / 2 + (index + 0.5) * width for place in places]
        heights = [value or 0.0 for value in values]
        panel.bar(at, heights, width, label=name, color=_COLOURS[index % len(_COLOURS)])
    labels = [str(label) for label in chart["x"]]
    turned = {"rotation": 60, "ha": "right"} if len(labels) > _MANY else {}
    panel.set_xticks(
        list(places),
        [label.replace("\n", "\n" if not turned else ", ") for label in labels],
        **turned,
    )


def _lines(panel: Any, chart: Mapping[str, Any]) -> None:
    for index, (name, values) in enumerate(chart["series"].items()):
        shown = [float("nan") if value is None else value for value in values]
        panel.plot(chart["x"], shown, "-o", label=name, color=_COLOURS[index % len(_COLOURS)])
