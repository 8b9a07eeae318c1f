"""A picture of the figures of ``leyline bench user-turn``: tokens and time, a bar per arm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..pictures import new_figure, save_figure
from ..replay.plot import INK

# Okabe and Ito's palette.
_COLOURS = {
    "full": "#999999",
    "radix": "#0072B2",
    "strip": "#56B4E9",
    "splice": "#009E73",
    "floor": "#D55E00",
}


def draw(document: Mapping[str, Any], out: Path) -> None:
    """Write a PNG, SVG or PDF, by the suffix of ``out``.

    Args:
        document: the benchmark's JSON.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    rows = {**document["arms"], "floor": document["floor"]}
    drawn = {arm: rows[arm] for arm in _COLOURS if (rows.get(arm) or {}).get("available", True)}
    shown = {arm: figures for arm, figures in drawn.items() if figures is not None}
    figure = new_figure(8.4, 3.6)
    panels = figure.subplots(1, 2)
    measures = {
        "tokens prefilled, mean": [figures["prefilled_tokens"] for figures in shown.values()],
        "ms to the first token, median": [each["ttft_ms"]["p50"] for each in shown.values()],
    }
    for panel, (label, values) in zip(panels, measures.items(), strict=True):
        panel.bar(list(shown), values, color=[_COLOURS[arm] for arm in shown])
        panel.set_yscale("log")
        panel.set_ylabel(label, color=INK)
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(colors=INK, labelsize=9)
    save_figure(figure, out)
