"""A picture of the three-arm figures: the first token's time by concurrency, a line per arm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..pictures import BLUE, GREEN, GREY, INK, RED, frame, legend_below, new_figure, save_figure

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

    Raises:
        MissingExtraError: matplotlib is not installed.
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
