"""Charts of a report as SVG text that a page can hold."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from typing import Any

from ..pictures import new_figure
from ..replay.plot import INK

# Okabe and Ito's palette.
_COLOURS = ("#0072B2", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#D55E00")
_WIDTH, _HEIGHT, _HIGHER = 9.0, 4.2, 5.6
_BAR_GROUP = 0.8
_MANY = 6
"""Number of labels from which on they are turned."""


def chart_svg(chart: Mapping[str, Any]) -> str:
    """Return a chart as an ``<svg>`` element.

    Args:
        chart: a chart as JSON; see :class:`~leyline_lab.fidelity.experiment.Chart`.

    Raises:
        MissingExtraError: matplotlib isn't installed.
    """
    labels = [str(label) for label in chart["x"]]
    figure = new_figure(_WIDTH, _HEIGHT if len(labels) <= _MANY else _HIGHER)
    import matplotlib

    panel = figure.subplots()
    draw = _bars if chart["kind"] == "bar" else _lines
    draw(panel, chart)
    panel.set_xlabel(chart["x_label"], color=INK)
    panel.set_ylabel(chart["y_label"], color=INK)
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=INK, labelsize=8)
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
