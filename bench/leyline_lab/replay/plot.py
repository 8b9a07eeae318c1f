"""Pictures of a replay: prompt tokens by turn and by source, a panel per arm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..pictures import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PINK,
    frame,
    headline,
    legend_below,
    new_figure,
    save_figure,
    stacked_bars,
)
from .results import Arm, ArmRun, RequestResult, summarise

COLOURS = {"cached": BLUE, "spliced": GREEN, "reused": PINK, "prefilled": ORANGE}
SHADES = {"cached": "█", "spliced": "▓", "reused": "▒", "prefilled": "░"}
LABELS = {
    "cached": "cached (exact prefix)",
    "spliced": "spliced (moved in the cache)",
    "reused": "reused (copied from elsewhere)",
    "prefilled": "prefilled (computed)",
}
TITLES = {
    Arm.OFF: "No cache",
    Arm.RADIX: "Prefix cache",
    Arm.SPLICE: "Leyline",
}


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Tokens of one turn, averaged over the sessions that have it."""

    turn: int
    cached: float
    spliced: float
    reused: float
    prefilled: float


def by_turn(run: ArmRun) -> list[TurnTokens]:
    """Return the run's turns in order, from 1."""
    grouped: dict[int, list[RequestResult]] = defaultdict(list)
    for result in run.results:
        grouped[result.turn].append(result)
    turns = []
    for turn, results in sorted(grouped.items()):
        means = (sum(getattr(one, kind) for one in results) / len(results) for kind in COLOURS)
        turns.append(TurnTokens(turn + 1, *means))
    return turns


def _kinds(runs: Mapping[Arm, ArmRun]) -> list[str]:
    """Return the sources to draw: reuse only where an arm had it."""
    reuses = any(result.reused for run in runs.values() for result in run.results)
    return [kind for kind in COLOURS if reuses or kind != "reused"]


def draw(runs: Mapping[Arm, ArmRun], out: Path, title: str) -> None:
    """Write a PNG, SVG or PDF, by the suffix of ``out``."""
    figure = new_figure(4.2 * len(runs), 4.4)
    kinds = _kinds(runs)
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for panel, (arm, run) in zip(panels, runs.items(), strict=True):
        _draw_panel(panel, arm, run, kinds)
    panels[0].set_ylabel("prompt tokens", color=INK)
    legend_below(figure, panels[0], len(kinds))
    headline(figure, title)
    save_figure(figure, out)


def _draw_panel(panel: Any, arm: Arm, run: ArmRun, kinds: Sequence[str]) -> None:
    turns = by_turn(run)
    places = [turn.turn for turn in turns]
    layers: dict[str, list[float]] = {kind: [getattr(t, kind) for t in turns] for kind in kinds}
    stacked_bars(panel, places, layers, colours=COLOURS, labels=LABELS)
    total = summarise(run)
    subtitle = f"{total.hit_ratio:.1%} of prompt tokens reused"
    if total.ttft_p50_ms is not None:
        subtitle += f"\nfirst token after {total.ttft_p50_ms:,.0f} ms (median)"
    else:
        subtitle += "\ncomputed, not run"
    panel.set_title(TITLES[arm], loc="left", fontsize=12, fontweight="bold", color=INK, pad=34)
    panel.text(0, 1.02, subtitle, transform=panel.transAxes, fontsize=9, color=INK, va="bottom")
    panel.set_xlabel("turn", color=INK)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.yaxis.set_major_formatter("{x:,.0f}")
    frame(panel)


def print_bars(console: Console, runs: Mapping[Arm, ArmRun], *, width: int = 56) -> None:
    """Print the same picture in a terminal: a bar per turn, arms one below the other."""
    drawn = {arm: by_turn(run) for arm, run in runs.items()}
    longest = max((_length(turn) for turns in drawn.values() for turn in turns), default=0.0)
    if not longest:
        return
    for arm, turns in drawn.items():
        console.print(Text(f"{arm.value}: prompt tokens by turn", style="bold"))
        for turn in turns:
            console.print(_bar(turn, width / longest))
    legend = Text()
    for kind in _kinds(runs):
        legend.append("█ ", style=COLOURS[kind]).append(f"{LABELS[kind]}   ")
    console.print(legend)


def _bar(turn: TurnTokens, scale: float) -> Text:
    line = Text(f"{turn.turn:>4} ")
    for cells, (kind, colour) in zip(_cells(turn, scale), COLOURS.items(), strict=True):
        # Shades as well as colours: the bar is readable without colour.
        line.append(SHADES[kind] * cells, style=colour)
    return line.append(f" {_length(turn):,.0f}", style="dim")


def _cells(turn: TurnTokens, scale: float) -> Sequence[int]:
    """Return whole cells whose ends are the rounded running sums, for a bar of the right length."""
    sums = accumulate(getattr(turn, kind) for kind in COLOURS)
    ends = [0, *(round(total * scale) for total in sums)]
    return [end - start for start, end in pairwise(ends)]


def _length(turn: TurnTokens) -> float:
    return turn.cached + turn.spliced + turn.reused + turn.prefilled
