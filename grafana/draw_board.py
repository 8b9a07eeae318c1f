"""Draw a board as a picture, from a Prometheus server's data; no Grafana is needed:

    python grafana/draw_board.py cache-hit http://127.0.0.1:9090 out/cache-hit.png

It shows panels where Grafana puts them, with their queries' data; looks are its own.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.ticker import FuncFormatter

FOLDER = Path(__file__).resolve().parent / "dashboards"
COLUMNS, COLUMN_INCHES, ROW_INCHES = 24, 0.72, 0.36
UNITS = {"cpm": "/min", "s": " s", "bytes": " B", "Bps": " B/s", "watt": " W", "joule": " J"}
COLORS = {"text": "lightgrey"}
Series = list[tuple[str, list[float], list[float]]]


class Data:
    """The series of a board.

    Args:
        rate: window of rates.
    """

    def __init__(self, url: str, minutes: float, rate: str, end: float) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=60)
        self.end = end
        self.start = self.end - 60 * minutes
        self._rate, self._range = rate, f"{60 * minutes:.0f}s"

    def of(self, target: Mapping[str, Any]) -> Series:
        """Return name, times and values of each series that a query gives."""
        expr = str(target["expr"])
        expr = expr.replace("$__rate_interval", self._rate).replace("$__range", self._range)
        expr = re.sub(r"\$[a-z]+", ".*", expr)
        instant = bool(target.get("instant"))
        params: dict[str, str | float] = {"query": expr}
        if instant:
            params["time"] = self.end
        else:
            params |= {"start": self.start, "end": self.end, "step": 1}
        answer = self._http.get("/query" if instant else "/query_range", params=params)
        answer.raise_for_status()
        found: Series = []
        for series in answer.json()["data"]["result"]:
            samples = [series["value"]] if instant else series["values"]
            values = [float(value) for _, value in samples]
            if any(math.isfinite(value) for value in values):
                name = _legend(target.get("legendFormat", ""), series["metric"])
                found.append((name, [float(at) for at, _ in samples], values))
        return found


def _legend(form: str, labels: Mapping[str, str]) -> str:
    if form in ("", "__auto"):
        return ", ".join(labels.values())
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), form)


def _text(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "-"
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}{UNITS.get(unit, '')}"
    return f"{value:.3g}{UNITS.get(unit, '')}"


def _color(panel: Mapping[str, Any], value: float) -> str:
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return str(reached[-1])


def _draw_value(axes: Axes, panel: Mapping[str, Any], series: Series, unit: str) -> None:
    axes.axis("off")
    if not series:
        axes.text(0.5, 0.45, "no traffic", ha="center", va="center", color="grey")
        return
    value = next(number for number in reversed(series[0][2]) if math.isfinite(number))
    words = {
        key: option["text"]
        for mapping in panel["fieldConfig"]["defaults"].get("mappings", [])
        for key, option in mapping["options"].items()
    }
    text = words.get(f"{value:g}", _text(value, unit))
    axes.text(0.5, 0.45, text, ha="center", va="center", fontsize=22, color=_color(panel, value))


def _draw_bars(axes: Axes, panel: Mapping[str, Any], series: Series, unit: str) -> None:
    names = [name for name, _, _ in series]
    values = [numbers[-1] for _, _, numbers in series]
    axes.barh(names, values, color=[_color(panel, value) for value in values])
    axes.set_xlim(0, 1.1)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    for place, value in enumerate(values):
        axes.text(value + 0.01, place, _text(value, unit), va="center", fontsize=7)


def _days(times: Sequence[float]) -> Any:
    return date2num([time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) for at in times])


def _draw_lines(axes: Axes, panel: Mapping[str, Any], series: Series, unit: str) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults["custom"].get("stacking", {}).get("mode") == "normal"
    fixed = {
        override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
        for override in panel["fieldConfig"].get("overrides", [])
    }
    below: dict[float, float] = {}
    for place, (name, times, values) in enumerate(series):
        color = fixed.get(name, f"C{place % 10}")
        color = COLORS.get(color, color)
        days = _days(times)
        if stacked:
            base = [below.get(at, 0.0) for at in times]
            top = [low + value for low, value in zip(base, values, strict=True)]
            axes.fill_between(days, base, top, label=name, color=color, alpha=0.7, linewidth=0)
            below |= dict(zip(times, top, strict=True))
        else:
            axes.plot(days, values, label=name, color=color, linewidth=1.4)
    axes.set_ylim(bottom=0, top=defaults.get("max"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _text(value, unit)))
    locator = AutoDateLocator(maxticks=6)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=6, loc="upper left", ncols=2)


DRAWN = {"stat": _draw_value, "bargauge": _draw_bars, "timeseries": _draw_lines}


def draw(name: str, data: Data, target: Path) -> None:
    """Write the picture of one board; tables are left out."""
    board = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    size = (COLUMNS * COLUMN_INCHES, height * ROW_INCHES + 0.5)
    mpl.rcParams.update({"font.size": 8, "axes.titlesize": 9, "axes.titleweight": "bold"})
    figure = plt.figure(figsize=size)
    figure.suptitle(board["title"], x=0.01, y=0.995, ha="left", va="top", fontsize=13)
    inch_x, inch_y = 1 / size[0], 1 / size[1]
    for panel in board["panels"]:
        grid = panel["gridPos"]
        left = grid["x"] * COLUMN_INCHES * inch_x
        top = 1 - (0.5 + grid["y"] * ROW_INCHES) * inch_y
        if panel["type"] == "row":
            figure.text(left + 0.01, top - 0.7 * ROW_INCHES * inch_y, panel["title"], fontsize=11)
            continue
        wide, high = grid["w"] * COLUMN_INCHES * inch_x, grid["h"] * ROW_INCHES * inch_y
        margin = (1.1 if panel["type"] == "bargauge" else 0.6) * inch_x
        box = (left + margin, top - high + 0.3 * inch_y)
        axes = figure.add_axes((*box, wide - margin - 0.25 * inch_x, high - 0.7 * inch_y))
        axes.set_title(panel["title"], loc="left")
        if panel["type"] not in DRAWN:
            axes.axis("off")
            axes.text(0.5, 0.5, "a table", ha="center", va="center", color="grey")
            continue
        series = [one for query in panel["targets"] for one in data.of(query)]
        unit = panel["fieldConfig"]["defaults"].get("unit", "")
        if not series and panel["type"] != "stat":
            axes.axis("off")
            axes.text(0.5, 0.5, "no data", ha="center", va="center", color="grey")
            continue
        DRAWN[panel["type"]](axes, panel, series, unit)
        if panel["type"] == "timeseries":
            axes.set_xlim(*_days((data.start, data.end)))
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=80)
    plt.close(figure)


def main() -> None:
    """Draw a board."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("board", choices=sorted(path.stem for path in FOLDER.glob("*.json")))
    parser.add_argument("prometheus", help="address of the server")
    parser.add_argument("picture", type=Path, help="file to write")
    parser.add_argument("--minutes", type=float, default=15.0, help="length of the time range")
    parser.add_argument("--rate", default="20s", help="window of rates")
    parser.add_argument("--at", type=float, help="its end in seconds since 1970, if not now")
    given = parser.parse_args()
    end = time.time() if given.at is None else given.at
    draw(given.board, Data(given.prometheus, given.minutes, given.rate, end), given.picture)


if __name__ == "__main__":
    main()
