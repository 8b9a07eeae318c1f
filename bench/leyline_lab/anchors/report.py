"""Figures of arms by file: totals, table, picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..pictures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    frame,
    legend_below,
    new_figure,
    save_figure,
)
from .arms import ARMS, CHOSEN, Arm, costs
from .recorded import Turn
from .slots import Eviction

GOAL: Final = 2.0
"""Points of the prompt that anchors may cost beside rows alone, in edited turns."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm on one file."""

    file: str
    arm: str
    slots: int | None
    eviction: str
    edited_turns: int
    edited_prompt: int
    edited_prefilled: int
    prompt: int
    prefilled: int
    """Over all turns, as the line above."""
    states: int
    """Largest number of states of one session held at the end of a turn."""

    @property
    def label(self) -> str:
        """Name of a row."""
        return f"{self.slots} states, {self.eviction}" if self.slots else self.arm

    @property
    def edited(self) -> float:
        """Per cent of the prompts of edited turns that are prefilled."""
        return 100 * self.edited_prefilled / max(1, self.edited_prompt)

    @property
    def all(self) -> float:
        """Per cent of all prompts that are prefilled."""
        return 100 * self.prefilled / max(1, self.prompt)


def figures(file: str, sessions: Sequence[Sequence[Turn]], arm: Arm) -> Figures:
    """Play all sessions of a file under an arm."""
    played = [costs(session, arm) for session in sessions]
    pairs = [
        (turn, tokens)
        for session, (found, _) in zip(sessions, played, strict=True)
        for turn, tokens in zip(session, found, strict=True)
    ]
    edited = [(turn, tokens) for turn, tokens in pairs if turn.copies]
    return Figures(
        file,
        arm.name,
        arm.slots,
        arm.eviction.value,
        len(edited),
        sum(turn.length for turn, _ in edited),
        sum(tokens for _, tokens in edited),
        sum(turn.length for turn, _ in pairs),
        sum(tokens for _, tokens in pairs),
        max((peak for _, peak in played), default=0),
    )


def rows(found: Sequence[Figures]) -> Iterator[list[str]]:
    """Yield a row for each arm: per cent by file, in edited turns and in all, and most states."""
    least = {each.file: each.edited for each in found if each.arm == ARMS[0].name}
    for arm in dict.fromkeys(each.label for each in found):
        own = [each for each in found if each.label == arm]
        reached = all(each.edited <= least[each.file] + GOAL for each in own)
        cells = (f"{each.edited:.2f} ({each.all:.2f})" for each in own)
        yield [arm, *cells, "yes" if reached else "", str(max(each.states for each in own))]


_DRAWN: Final[Mapping[str, str]] = {
    "native prefix": GREY,
    "ends, not carried": ORANGE,
    "ends": SKY,
    CHOSEN.name: GREEN,
    "rows alone": BLUE,
}


def draw(found: Sequence[Figures], out: Path) -> None:
    """Draw bars by file and arm, and lines by number of slots."""
    figure = new_figure(11, 4.6)
    files = list(dict.fromkeys(each.file for each in found))
    bars, lines = figure.subplots(1, 2, width_ratios=[1.6, 1])
    for index, (arm, colour) in enumerate(_DRAWN.items()):
        heights = [each.edited for each in found if each.label == arm]
        places = [group + (index - 2) * 0.17 for group in range(len(files))]
        bars.bar(places, heights, 0.16, color=colour, label=arm)
        for place, height in zip(places, heights, strict=True):
            bars.text(place, height + 1, f"{height:.0f}", ha="center", fontsize=8)
    bars.set_xticks(range(len(files)), [file.partition("_")[2] for file in files])
    bars.set_ylabel("% of the prompts of edited turns")
    frame(bars, "Prefilled, without a bound on states")
    for eviction, colour in zip(Eviction, (ORANGE, GREEN), strict=True):
        own = [each for each in found if each.slots and each.eviction == eviction.value]
        bounds = sorted({each.slots or 0 for each in own})
        worst = [max(each.edited for each in own if each.slots == bound) for bound in bounds]
        lines.plot(bounds, worst, marker="o", color=colour, label=eviction.value)
        lines.set_xticks(bounds, bounds)
    lines.set_ylim(0)
    lines.legend(frameon=False)
    frame(lines, "The worst file, by states of a session")
    legend_below(figure, bars, 3)
    save_figure(figure, out)
