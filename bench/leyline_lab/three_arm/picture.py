"""A picture of the three-arm figures: the first token's time by concurrency, a line per arm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..pictures import new_figure, save_figure
from ..replay.plot import INK

# Okabe and Ito's palette, with a marker each: distinguishable without colour.
_STYLES = {
    "off": ("#999999", "s", "no cache"),
    "radix": ("#0072B2", "o", "prefix cache"),
    "splice": ("#009E73", "D", "Leyline"),
    "floor": ("#D55E00", "_", "floor: as many new tokens, the rest cached"),
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
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    save_figure(figure, out)


def _draw_panel(panel: Any, levels: Mapping[int, Any], phase: str) -> None:
    for name, (colour, marker, label) in _STYLES.items():
        drawn = {at: found[name]["ttft_ms"]["p50"] for at, found in levels.items() if name in found}
        if drawn:
            panel.plot(*zip(*drawn.items(), strict=True), color=colour, marker=marker, label=label)
    panel.set_title(phase, loc="left", color=INK)
    panel.set_yscale("log")
    panel.set_xscale("log", base=2)
    panel.set_xticks(sorted(levels), [str(at) for at in sorted(levels)])
    panel.minorticks_off()
    panel.set_xlabel("sessions at once")
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=INK, labelsize=9)
