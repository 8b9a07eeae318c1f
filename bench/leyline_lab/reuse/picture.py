"""A picture of the figures of ``leyline bench reuse``: tokens served, by pattern and method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..pictures import new_figure, save_figure
from ..replay.plot import INK

# Okabe and Ito's palette.
_PREFIX = "#0072B2"
_BEYOND = {"leyline": "#009E73", "cdc": "#E69F00", "lmcache": "#56B4E9"}
_WIDTH = 0.26


def draw(document: Mapping[str, Any], out: Path) -> None:
    """Write a PNG, SVG or PDF, by the suffix of ``out``.

    Args:
        document: the benchmark's JSON.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = new_figure(8.4, 4.4)
    panel = figure.subplots()
    patterns = document["patterns"]
    places = range(len(patterns))
    for index, (arm, colour) in enumerate(_BEYOND.items()):
        found = [figures["arms"].get(arm) for figures in patterns.values()]
        at = [place + (index - 1) * _WIDTH for place in places]
        prefix = [100 * arm_["prefix"] if arm_ else 0 for arm_ in found]
        beyond = [100 * arm_["additional"] if arm_ else 0 for arm_ in found]
        label = "exact prefix" if index == 0 else None
        panel.bar(at, prefix, _WIDTH, color=_PREFIX, label=label)
        panel.bar(at, beyond, _WIDTH, bottom=prefix, color=colour, label=arm)
    for place, figures in enumerate(patterns.values()):
        if figures["recoverable"] is not None:
            most = 100 * (figures["prefix"] + figures["recoverable"])
            reach = 1.6 * _WIDTH
            label = "prefix and recoverable" if place == 0 else "_"
            panel.hlines(most, place - reach, place + reach, color=INK, label=label)
    panel.set_xticks(list(places), list(patterns))
    panel.set_ylabel("% of prompt tokens", color=INK)
    panel.set_ylim(0, 100)
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=INK, labelsize=9)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    save_figure(figure, out)
