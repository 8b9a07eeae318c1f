"""The sweep as a picture: resident pages by pool size, with a panel per policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .sweep import ACTIVE, CLAIMED, SweepPolicy, SweepRow

# Okabe and Ito's palette; refusals are hatched as well, for readers who can't see colour.
_SERVED, _REFUSED, _INK = "#0072B2", "#D55E00", "#333333"


class PictureError(RuntimeError):
    """The picture can't be drawn."""


def draw(rows: Sequence[SweepRow], out: Path) -> None:
    """Write a PNG, SVG or PDF, by the suffix of ``out``.

    Raises:
        PictureError: matplotlib is not installed, or doesn't know the suffix.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise PictureError(
            "matplotlib is not installed; install it with: pip install matplotlib"
        ) from error

    figure = Figure(figsize=(10.5, 3.6), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    if out.suffix.lstrip(".") not in canvas.get_supported_filetypes():
        raise PictureError(f"{out.name} has no suffix of a picture: use .png, .svg or .pdf")
    panels = figure.subplots(1, len(SweepPolicy), sharey=True)
    for panel, policy in zip(panels, SweepPolicy, strict=True):
        _draw_panel(panel, [row for row in rows if row.policy is policy], policy)
    panels[0].set_ylabel(f"pages still resident, of {CLAIMED}", color=_INK)
    figure.legend(
        handles=[
            Patch(facecolor=_SERVED, label="active request served"),
            Patch(
                facecolor=_REFUSED, hatch="//", edgecolor="white", label="refused, with its cause"
            ),
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, facecolor="white")


def _draw_panel(panel: Any, rows: Sequence[SweepRow], policy: SweepPolicy) -> None:
    for row in rows:
        panel.bar(
            row.usable,
            row.resident,
            width=7,
            color=_SERVED if row.served else _REFUSED,
            hatch=None if row.served else "//",
            edgecolor="white",
        )
    boundary = CLAIMED + ACTIVE
    panel.axvline(boundary - 5, color=_INK, linewidth=0.8, linestyle="--")
    panel.text(boundary - 4, CLAIMED + 2, "both fit", fontsize=8, color=_INK)
    panel.set_ylim(0, CLAIMED + 8)
    panel.set_xticks([row.usable for row in rows])
    panel.set_xlabel("usable pages", color=_INK)
    panel.set_title(policy.value.replace("_", " "), loc="left", color=_INK)
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=_INK, labelsize=8)
