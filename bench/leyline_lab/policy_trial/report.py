"""The result of a trial for readers: tables, and a picture of prompt tokens and prefill by turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leyline_proxy.model.prepared import FaultOrigin

from ..pictures import BLUE, GREEN, INK, ORANGE, frame, headline, new_figure, save_figure
from ..tables import figures_table
from .rules import RuleCheck
from .trial import SessionTrial, Totals, TrialReport, TurnTrial, total

_MODEL = (
    "prompt, sent: tokens over all turns; edits: new ones. Tokens to prefill, predicted: unedited "
    "(no policy, prefix cache), prefix (edited, prefix cache), splice (edited, spliced)."
)
_ROWS = 12
"""Largest number of sessions shown; the sum covers all."""


def print_trial(
    console: Console,
    report: TrialReport,
    title: str,
    *,
    turns: bool,
    rules: RuleCheck | None = None,
) -> None:
    """Print the sessions and their sum, the policies, then faults, notes and broken rules.

    Args:
        turns: True to show each turn of each session as well.
        rules: the check of the rules; None if there was none.
    """
    totals = report.totals()
    console.print(_sessions(report, totals, title))
    if totals.policies:
        console.print(_policies(totals))
    if turns:
        for session in report.sessions:
            console.print(_turns(session))
    for kind, counts in (("fault", totals.faults), ("note", totals.notes)):
        for name, count in counts.items():
            style = "red" if kind == "fault" else ""
            shown = f"{kind}: {escape(name)}, {count:,} times"
            console.print(shown, style=style, highlight=False)
            if kind == "fault":
                _print_origins(console, totals.origins.get(name, ()))
    if totals.refused:
        shown = (
            f"refused: {totals.refused:,} of {totals.turns:,} requests, because a policy that "
            "forgets fails; the figures are those of the unedited prompt"
        )
        console.print(shown, style="red", highlight=False)
    _print_rules(console, rules, [each for found in totals.origins.values() for each in found])
    console.print(verdict(totals), highlight=False)


def _print_origins(console: Console, origins: Sequence[FaultOrigin]) -> None:
    for origin in origins:
        for line in (origin.error, *(f"  {each}" for each in origin.frames)):
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _print_rules(
    console: Console, rules: RuleCheck | None, printed: Collection[FaultOrigin]
) -> None:
    """Print the rules that policies break, and the number of turns that were searched for them.

    Args:
        printed: origins that are already on the page.
    """
    if rules is None:
        return
    for broken in rules.broken:
        shown = f"rule broken: {broken.policy}, {broken.rule} ({broken.demand})"
        console.print(shown, style="red", markup=False, highlight=False, soft_wrap=True)
        console.print(f"  {broken.place}: {broken.detail}", markup=False, highlight=False)
        if broken.origin is not None and broken.origin not in printed:
            _print_origins(console, [broken.origin])
    breaking = {broken.policy for broken in rules.broken}
    if keeping := [name for name in rules.checked if name not in breaking]:
        text = f"rules: kept on {rules.turns:,} of {rules.of:,} turns ({', '.join(keeping)})"
        console.print(text, markup=False, highlight=False)
    if breaking:
        console.print("rules: a policy is checked up to the first rule that it breaks")


def verdict(totals: Totals) -> str:
    """Return the meaning of the figures in a sentence or two."""
    if not totals.original_tokens:
        return "There is no prompt to edit."
    share = totals.reclaimed_tokens / totals.original_tokens
    prefill = totals.prefill
    if not any(each.edits for each in totals.policies.values()):
        failing = ", and fail on some turns" if totals.faults else ""
        return f"The policies edit nothing on these sessions{failing}."
    text = f"{share:.1%} of the prompt tokens are reclaimed."
    if prefill.prefix > 1.01 * prefill.splice:
        text += (
            f" On a prefix cache the edits cost {tokens(prefill.prefix)} tokens of prefill where "
            f"splicing needs {tokens(prefill.splice)}; unedited it would be "
            f"{tokens(prefill.unedited)}."
        )
    return text


def _sessions(report: TrialReport, totals: Totals, title: str) -> Table:
    figures = ("turns", "prompt", "sent", "saved", "edits", "unedited", "prefix", "splice")
    table = figures_table(title, ("session",), figures, caption=_MODEL)
    table.columns[0].overflow, table.columns[0].max_width = "ellipsis", 15
    for session in report.sessions[:_ROWS]:
        table.add_row(escape(session.id), *_cells(total(session.turns)))
    hidden = len(report.sessions) - _ROWS
    if hidden > 0:
        table.add_row(f"… {hidden} more")
    if len(report.sessions) > 1:
        table.add_section()
        table.add_row(f"all {len(report.sessions)}", *_cells(totals))
    return table


def _cells(totals: Totals) -> list[str]:
    share = totals.reclaimed_tokens / totals.original_tokens if totals.original_tokens else 0.0
    prefill = totals.prefill
    return [
        f"{totals.turns:,}",
        tokens(totals.original_tokens),
        tokens(totals.sent_tokens),
        f"{share:.1%}",
        f"{sum(each.new_edits for each in totals.policies.values()):,}",
        *(tokens(count) for count in (prefill.unedited, prefill.prefix, prefill.splice)),
    ]


def _policies(totals: Totals) -> Table:
    figures = ("reclaimed", "edits", "new edits", "faults")
    caption = "tokens of a message count for the policy that edited it last"
    table = figures_table("", ("policy",), figures, caption=caption)
    faults = _faults_by_policy(totals.faults)
    for name, each in totals.policies.items():
        table.add_row(
            escape(name),
            tokens(each.reclaimed_tokens),
            f"{each.edits:,}",
            f"{each.new_edits:,}",
            f"{faults.get(name, 0):,}",
        )
    return table


def _faults_by_policy(faults: Mapping[str, int]) -> dict[str, int]:
    counted: dict[str, int] = {}
    for key, count in faults.items():
        name = key.rpartition(":")[0]
        counted[name] = counted.get(name, 0) + count
    return counted


def _turns(session: SessionTrial) -> Table:
    figures = ("turn", "prompt", "sent", "unedited", "prefix", "splice")
    table = figures_table(session.id, (), figures)
    table.add_column("new edits")
    for number, turn in enumerate(session.turns, start=1):
        edits = [f"{name} {n.new_edits}" for name, n in turn.policies.items() if n.new_edits]
        prefill = (turn.prefill.unedited, turn.prefill.prefix, turn.prefill.splice)
        counts = (turn.original_tokens, turn.sent_tokens, *prefill)
        table.add_row(str(number), *map(tokens, counts), escape(", ".join(edits)))
    return table


def tokens(count: int) -> str:
    """Return a number for a narrow cell: three digits and a unit."""
    rounded = float(f"{count:.3g}")
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(rounded) >= bound:
            return f"{rounded / bound:.3g}{unit}"
    return str(count)


# With a dash for each: distinguishable without colour.
_LINES: dict[str, tuple[str, str, Callable[[TurnTrial], int]]] = {
    "as the client sent it": (BLUE, "-", lambda turn: turn.original_tokens),
    "after the policies": (GREEN, "--", lambda turn: turn.sent_tokens),
}
_PREFILL: dict[str, tuple[str, str, Callable[[TurnTrial], int]]] = {
    "unedited, prefix cache": (BLUE, "-", lambda turn: turn.prefill.unedited),
    "edited, prefix cache": (ORANGE, ":", lambda turn: turn.prefill.prefix),
    "edited, spliced": (GREEN, "--", lambda turn: turn.prefill.splice),
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
        ValueError: a suffix of another kind.
    """
    figure = new_figure(10, 4.4)
    left, right = figure.subplots(1, 2)
    several = len(report.sessions) > 1
    for label, (colour, dash, value) in _LINES.items():
        _line(left, mean_by_turn(report, value), label, colour, dash)
    for label, (colour, dash, value) in _PREFILL.items():
        _line(right, sum_by_turn(report, value), label, colour, dash)
    _axes(left, "Prompt tokens" + (", mean over sessions" if several else ""))
    _axes(right, "Prefilled tokens, added up" + (" over all sessions" if several else ""))
    headline(figure, title, 12)
    save_figure(figure, out)


def _line(panel: Any, values: Sequence[float], label: str, colour: str, dash: str) -> None:
    places = range(1, len(values) + 1)
    panel.plot(places, values, dash, color=colour, label=label, linewidth=1.8)


def _axes(panel: Any, title: str) -> None:
    panel.set_xlabel("turn", color=INK)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter("{x:,.0f}")
    frame(panel, title)
    panel.legend(frameon=False, fontsize=9)
