"""The three-arm figures for readers: tables, and a picture of the time to the first token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..pictures import BLUE, GREEN, GREY, INK, RED, frame, legend_below, new_figure, save_figure
from ..tables import figures_table, met, milliseconds
from .figures import BenchArm

_COLUMNS = ("hit\nratio", "spliced", "prefilled", "TTFT\np50", "p90", "e2e\np50", "logit\ndelta")


def print_levels(console: Console, document: Mapping[str, Any], title: str) -> None:
    """Print a table of the replay and one of the edit, then the goals."""
    for phase in ("replay", "edit"):
        table = figures_table(f"{title}: {phase}", ("at\nonce", "arm"), _COLUMNS)
        for concurrency, level in document.items():
            _add_rows(table, concurrency, level if phase == "replay" else level["edit"])
        console.print(table)
        for concurrency, level in document.items():
            figures = level if phase == "replay" else level["edit"]
            for name, goal in figures["goal"].items():
                console.print(
                    f"{concurrency:>3} at once, {phase}, {name}: "
                    f"{goal['measured']} of at most {goal['bound']}: {met(goal['met'])}",
                    highlight=False,
                )


def _add_rows(table: Table, concurrency: str, figures: Mapping[str, Any]) -> None:
    for arm in BenchArm:
        found = figures.get(arm.value)
        if found is None:
            continue
        delta = found["logit_delta"]
        table.add_row(
            concurrency,
            arm.value,
            f"{found['hit_ratio']:.1%}",
            f"{found['spliced_tokens']:,.0f}",
            f"{found['prefilled_tokens']:,.0f}",
            milliseconds(found["ttft_ms"]["p50"]),
            milliseconds(found["ttft_ms"]["p90"]),
            milliseconds(found["e2e_ms"]["p50"]),
            "–" if delta is None else f"{delta:.1e}",
        )
    if (floor := figures.get("floor")) is not None:
        table.add_row(
            concurrency,
            "floor",
            "",
            "",
            f"{floor['must_prefill_tokens']:,.0f}",
            milliseconds(floor["ttft_ms"]["p50"]),
            milliseconds(floor["ttft_ms"]["p90"]),
            "",
            "",
            end_section=True,
        )


# With a marker each: distinguishable without colour.
_STYLES = {
    "off": (GREY, "s", "no cache"),
    "radix": (BLUE, "o", "prefix cache"),
    "splice": (GREEN, "D", "Leyline"),
    "floor": (RED, "_", "floor: as many new tokens, the rest cached"),
}


def draw(document: Mapping[str, Any], out: Path) -> None:
    """Write a PNG, SVG or PDF, by the suffix of ``out``.

    Args:
        document: the benchmark's JSON.
    """
    figure = new_figure(8.4, 4.4)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, phase in zip(panels, ("replay", "edit"), strict=True):
        levels = {
            int(name): level if phase == "replay" else level["edit"]
            for name, level in document.items()
        }
        _draw_panel(panel, levels, phase)
    panels[0].set_ylabel("ms to the first token, median", color=INK)
    legend_below(figure, panels[0], 2)
    save_figure(figure, out)


def _draw_panel(panel: Any, levels: Mapping[int, Any], phase: str) -> None:
    for name, (colour, marker, label) in _STYLES.items():
        drawn = {at: found[name]["ttft_ms"]["p50"] for at, found in levels.items() if name in found}
        if drawn:
            panel.plot(*zip(*drawn.items(), strict=True), color=colour, marker=marker, label=label)
    panel.set_yscale("log")
    panel.set_xscale("log", base=2)
    panel.set_xticks(sorted(levels), [str(at) for at in sorted(levels)])
    panel.minorticks_off()
    panel.set_xlabel("sessions at once")
    frame(panel, phase)
