"""The sweep as a picture: resident pages by pool size, with a panel per policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..pictures import BLUE, INK, RED, frame, new_figure, save_figure
from .sweep import ACTIVE, CLAIMED, SweepPolicy, SweepRow

# Refusals are hatched as well, for readers who can't see colour.
_SERVED, _REFUSED = BLUE, RED


def draw(rows: Sequence[SweepRow], out: Path) -> None:
    """Write a PNG, SVG or PDF, by the suffix of ``out``.

    Raises:
        LabError: matplotlib is not installed, or doesn't know the suffix.
    """
    figure = new_figure(10.5, 3.6)
    from matplotlib.patches import Patch

    panels = figure.subplots(1, len(SweepPolicy), sharey=True)
    for panel, policy in zip(panels, SweepPolicy, strict=True):
        _draw_panel(panel, [row for row in rows if row.policy is policy], policy)
    panels[0].set_ylabel(f"pages still resident, of {CLAIMED}", color=INK)
    served = Patch(facecolor=_SERVED, label="active request served")
    refused = Patch(
        facecolor=_REFUSED, hatch="//", edgecolor="white", label="refused, with its cause"
    )
    figure.legend(handles=[served, refused], loc="outside lower center", ncols=2, frameon=False)
    save_figure(figure, out)


def _draw_panel(panel: Any, rows: Sequence[SweepRow], policy: SweepPolicy) -> None:
    for row in rows:
        colour, hatch = (_SERVED, None) if row.served else (_REFUSED, "//")
        bar = {"color": colour, "hatch": hatch, "edgecolor": "white"}
        panel.bar(row.usable, row.resident, width=7, **bar)
    boundary = CLAIMED + ACTIVE
    panel.axvline(boundary - 5, color=INK, linewidth=0.8, linestyle="--")
    panel.text(boundary - 4, CLAIMED + 2, "both fit", fontsize=8, color=INK)
    panel.set_ylim(0, CLAIMED + 8)
    panel.set_xticks([row.usable for row in rows])
    panel.set_xlabel("usable pages", color=INK)
    frame(panel, policy.value.replace("_", " "), size=8)
