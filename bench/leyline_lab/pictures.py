"""Pictures of figures: their frame, their style, and the file that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import LabError

INK = "#333333"
# Okabe and Ito's palette: distinguishable with every common form of colour blindness.
BLUE, GREEN, ORANGE, SKY = "#0072B2", "#009E73", "#E69F00", "#56B4E9"
PINK, RED, GREY = "#CC79A7", "#D55E00", "#999999"


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of so many inches, without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def frame(panel: Any, title: str = "", *, grid: bool = True, size: int = 9) -> None:
    """Give a panel the common style: lines at its values, no frame above and on the right."""
    if title:
        panel.set_title(title, loc="left", fontsize=11, color=INK)
    if grid:
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=INK, labelsize=size)


def stacked_bars(
    panel: Any,
    places: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    *,
    colours: Mapping[str, str],
    labels: Mapping[str, str],
    width: float = 0.86,
) -> None:
    """Draw bars of layers on each other, each with the colour and the label of its name."""
    base = [0.0] * len(places)
    for name, heights in layers.items():
        drawn = {"color": colours[name], "label": labels[name]}
        panel.bar(places, heights, bottom=base, width=width, **drawn)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    panel.set_xlim(0.3, max(places, default=1) + 0.7)


def legend_below(figure: Any, panel: Any, columns: int) -> None:
    """Put a panel's legend below all panels."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def headline(figure: Any, title: str, size: int = 13) -> None:
    """Put a title above all panels, at the left."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=size, color=INK, wrap=True)


def save_figure(figure: Any, out: Path) -> None:
    """Write a PNG, SVG or PDF, by the suffix of ``out``.

    Raises:
        LabError: a suffix of another kind.
    """
    if out.suffix.lstrip(".") not in figure.canvas.get_supported_filetypes():
        raise LabError(f"{out.name} has no suffix of a picture: use .png, .svg or .pdf")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, facecolor="white")
