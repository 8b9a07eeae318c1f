"""The frame of each picture: an empty figure, and the file that it becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import MissingExtraError


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of so many inches, without a window.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib") from error

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, out: Path) -> None:
    """Write a PNG, SVG or PDF, by the suffix of ``out``.

    Raises:
        ValueError: a suffix of another kind.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, facecolor="white")
