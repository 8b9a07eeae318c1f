"""A picture of a trial: prompt tokens by turn, and the accumulated prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..pictures import new_figure, save_figure
from ..replay.plot import INK
from .trial import TrialReport, TurnTrial

# Okabe and Ito's palette, with a dash for each: distinguishable without colour.
_LINES: dict[str, tuple[str, str, Callable[[TurnTrial], int]]] = {
    "as the client sent it": ("#0072B2", "-", lambda turn: turn.original_tokens),
    "after the policies": ("#009E73", "--", lambda turn: turn.sent_tokens),
}
_PREFILL: dict[str, tuple[str, str, Callable[[TurnTrial], int]]] = {
    "unedited, prefix cache": ("#0072B2", "-", lambda turn: turn.prefill.unedited),
    "edited, prefix cache": ("#E69F00", ":", lambda turn: turn.prefill.prefix),
    "edited, spliced": ("#009E73", "--", lambda turn: turn.prefill.splice),
}


def mean_by_turn(report: TrialReport, figure: Callable[[TurnTrial], int]) -> list[float]:
    """Return a figure by turn, each the mean over the sessions that have the turn."""
    longest = max((len(session.turns) for session in report.sessions), default=0)
    means = []
    for turn in range(longest):
        values = [figure(s.turns[turn]) for s in report.sessions if turn < len(s.turns)]
        means.append(sum(values) / len(values))
    return means


def sum_by_turn(report: TrialReport, figure: Callable[[TurnTrial], int]) -> list[int]:
    """Return a figure of all sessions together, accumulated by turn."""
    longest = max((len(session.turns) for session in report.sessions), default=0)
    sums: list[int] = []
    for turn in range(longest):
        here = sum(figure(s.turns[turn]) for s in report.sessions if turn < len(s.turns))
        sums.append(here + (sums[-1] if sums else 0))
    return sums


def draw_trial(report: TrialReport, out: Path, title: str) -> None:
    """Write a PNG, SVG or PDF, by the suffix of ``out``.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ValueError: a suffix of another kind.
    """
    figure = new_figure(10, 4.4)
    left, right = figure.subplots(1, 2)
    several = len(report.sessions) > 1
    for label, (colour, dash, value) in _LINES.items():
        _line(left, mean_by_turn(report, value), label, colour, dash)
    for label, (colour, dash, value) in _PREFILL.items():
        _line(right, sum_by_turn(report, value), label, colour, dash)
    _frame(left, "Prompt tokens" + (", mean over sessions" if several else ""))
    _frame(right, "Prefilled tokens, added up" + (" over all sessions" if several else ""))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    save_figure(figure, out)


def _line(panel: Any, values: Sequence[float], label: str, colour: str, dash: str) -> None:
    places = range(1, len(values) + 1)
    panel.plot(places, values, dash, color=colour, label=label, linewidth=1.8)


def _frame(panel: Any, title: str) -> None:
    panel.set_title(title, loc="left", fontsize=11, color=INK)
    panel.set_xlabel("turn", color=INK)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=INK, labelsize=9)
    panel.legend(frameon=False, fontsize=9)
