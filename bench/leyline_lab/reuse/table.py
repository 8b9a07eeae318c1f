"""The figures of ``leyline bench reuse`` for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

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
