"""A picture of an estimate: prompt tokens by source, for each file and over the turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..pictures import new_figure, save_figure
from ..replay.plot import COLOURS as REPLAY_COLOURS
from ..replay.plot import INK
from .results import RoiReport, Served, by_turn

COLOURS = {
    "prefix": REPLAY_COLOURS["cached"],
    "edits": REPLAY_COLOURS["spliced"],
    "reuse": REPLAY_COLOURS["reused"],
    "prefill": REPLAY_COLOURS["prefilled"],
}
LABELS = {
    "prefix": "exact prefix",
    "edits": "spliced after edits",
    "reuse": "content reuse",
    "prefill": "prefilled",
}
_MOST_LETTERS = 30


def draw_roi(report: RoiReport, out: Path, title: str) -> None:
    """Write a PNG, SVG or PDF, by the suffix of ``out``.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ValueError: a suffix of another kind.
    """
    rows = [(file.name, file.served) for file in report.files]
    if len(rows) > 1:
        rows.append(("all files", report.served))
    height = max(4.2, 1.8 + 0.42 * len(rows))
    figure = new_figure(12.5, height)
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    _draw_files(left, rows)
    _draw_turns(right, by_turn(report))
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK)
    save_figure(figure, out)


def _draw_files(panel: Any, rows: Sequence[tuple[str, Served]]) -> None:
    places = range(len(rows))
    base = [0.0] * len(rows)
    for source, colour in COLOURS.items():
        widths = [100 * served.share(served.by_source()[source]) for _, served in rows]
        panel.barh(places, widths, left=base, height=0.74, color=colour, label=LABELS[source])
        for place, start, width in zip(places, base, widths, strict=True):
            if width >= 5:
                dark = source in ("prefix", "edits")
                panel.text(
                    start + width / 2,
                    place,
                    f"{width:.0f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if dark else INK,
                )
        base = [start + width for start, width in zip(base, widths, strict=True)]
    for place, (_, served) in enumerate(rows):
        gain = f"+{100 * served.share(served.reuse):.1f} reuse"
        panel.text(101, place, gain, va="center", fontsize=9, color=INK, clip_on=False)
    panel.set_yticks(places, [_short(name) for name, _ in rows])
    panel.set_ylim(max(len(rows), 4) - 0.4, -0.6)  # from the top, no bar too thick
    panel.set_xlim(0, 100)
    panel.set_xlabel("% of the prompt tokens", color=INK)
    panel.set_title("By file", loc="left", fontsize=11, color=INK)
    _frame(panel)


def _draw_turns(panel: Any, turns: Sequence[Served]) -> None:
    places = [place + 1 for place in range(len(turns))]
    base = [0.0] * len(turns)
    for source, colour in COLOURS.items():
        heights = [100 * turn.share(turn.by_source()[source]) for turn in turns]
        panel.bar(
            places, heights, bottom=base, width=1.0 if len(turns) > 40 else 0.86, color=colour
        )
        base = [low + height for low, height in zip(base, heights, strict=True)]
    panel.set_xlim(0.3, max(places, default=1) + 0.7)
    panel.set_ylim(0, 100)
    panel.set_xlabel("turn", color=INK)
    panel.set_ylabel("% of the prompt tokens", color=INK)
    panel.set_title("By turn, all sessions together", loc="left", fontsize=11, color=INK)
    _frame(panel)


def _frame(panel: Any) -> None:
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=INK, labelsize=9)


def _short(name: str) -> str:
    stem = name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    return stem if len(stem) <= _MOST_LETTERS else f"{stem[: _MOST_LETTERS - 1]}…"
