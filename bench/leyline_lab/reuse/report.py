"""The figures of ``leyline bench reuse`` for readers: a table, and a picture by pattern."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..pictures import BLUE, GREEN, INK, ORANGE, SKY, frame, new_figure, save_figure
from ..tables import figures_table
from .figures import CLOSENESS, GOAL

_COLUMNS = (
    "prefix\n%",
    "addi-\ntional",
    "total\n%",
    "recov-\nerable",
    "TTFT/\nradix",
    "KL",
    "argmax\n%",
    "first\ndiff.",
)
_FINE = 0.001


def print_patterns(console: Console, document: Mapping[str, Any], title: str) -> None:
    """Print a row per pattern and arm, then the goals, then what wasn't measured."""
    table = figures_table(title, ("pattern", "arm"), _COLUMNS, gap=0)
    for pattern, figures in document["patterns"].items():
        table.add_row(pattern, "leyline", *_cells(figures))
        for arm in ("naive", "cdc", "lmcache"):
            if arm in figures["arms"]:
                table.add_row("", arm, *_cells(figures["arms"][arm]))
        table.add_section()
    console.print(table)
    for pattern, figures in document["patterns"].items():
        if figures["goal_met"] is None:
            continue
        bound = figures["prefix"] + GOAL * figures["recoverable"]
        verdict = "met" if figures["goal_met"] else "MISSED"
        console.print(
            f"{pattern}: total {figures['total']:.2%}, at least {bound:.2%}: {verdict}",
            highlight=False,
        )
    missing = _missing(document["patterns"])
    if missing:
        console.print(f"not measured (null): {', '.join(missing)}", highlight=False)


def _cells(figures: Mapping[str, Any]) -> list[str]:
    shares = [_percent(figures.get(n)) for n in ("prefix", "additional", "total", "recoverable")]
    ratio, kl, equal, first = (figures.get(n) for n in ("ttft_ratio_to_radix", *CLOSENESS))
    fine = kl is not None and 0 < kl < _FINE
    return [
        *shares,
        "" if ratio is None else f"{ratio:.2f}",
        "" if kl is None else f"{kl:.1e}" if fine else f"{kl:.3f}",
        _percent(equal),
        "" if first is None else f"{first:.1f}",
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _missing(patterns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the measures that have no value in some pattern."""
    names: dict[str, None] = {}
    for figures in patterns.values():
        for name, value in figures.items():
            if value is None:
                names[name] = None
        for arm, found in figures["arms"].items():
            for name, value in found.items():
                if value is None and arm != "leyline":
                    names[f"{name} of {arm}"] = None
    return list(names)


_BEYOND = {"leyline": GREEN, "cdc": ORANGE, "lmcache": SKY}
_WIDTH = 0.26


def draw(document: Mapping[str, Any], out: Path) -> None:
    """Write a PNG, SVG or PDF, by the suffix of ``out``.

    Args:
        document: the benchmark's JSON.
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
        panel.bar(at, prefix, _WIDTH, color=BLUE, label=label)
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
    frame(panel)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    save_figure(figure, out)
