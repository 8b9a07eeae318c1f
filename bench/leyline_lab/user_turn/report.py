"""The figures of ``leyline bench user-turn`` for readers: a table, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..pictures import BLUE, GREEN, GREY, INK, RED, SKY, frame, new_figure, save_figure
from ..tables import figures_table, met, milliseconds, share, whole

_COLUMNS = (
    "prompt",
    "pre-\nfilled",
    "chan-\nged",
    "re-\nused",
    "TTFT\np50",
    "p90",
    "equal\nanswers",
    "equal\ntokens",
    "in\nloop",
)


def print_arms(console: Console, document: Mapping[str, Any]) -> None:
    """Print a row per arm, then the goals, then what wasn't measured."""
    size = f"{document['calls']} calls per loop, {document['user_turns']} user turns"
    title = f"user turns on {document['engine']}, {document['model']}: {size}"
    table = figures_table(title, ("arm",), _COLUMNS)
    for arm, figures in document["arms"].items():
        if figures["available"]:
            table.add_row(arm, *_cells(figures))
    if document["floor"] is not None:
        table.add_row("floor", *_cells(document["floor"]))
    console.print(table)
    for name, goal in document["goal"].items():
        bound = (
            f"at most {goal['at_most']}" if "at_most" in goal else f"at least {goal['at_least']}"
        )
        console.print(f"{name}: {goal['measured']}, {bound}: {met(goal['met'])}", highlight=False)
    for arm, figures in document["arms"].items():
        if not figures["available"]:
            console.print(f"{arm}: not available: {figures['reason']}", highlight=False)


def _cells(figures: Mapping[str, Any]) -> list[str]:
    agreement = figures.get("agreement") or {}
    return [
        whole(figures["prompt_tokens"]),
        whole(figures["prefilled_tokens"]),
        whole(figures.get("changed_and_new_tokens")),
        share(figures.get("unchanged_reused")),
        milliseconds(figures["ttft_ms"]["p50"]),
        milliseconds(figures["ttft_ms"]["p90"]),
        share(agreement.get("answers")),
        share(agreement.get("tokens")),
        whole(figures.get("loop_prefilled_tokens")),
    ]


_COLOURS = {"full": GREY, "radix": BLUE, "strip": SKY, "splice": GREEN, "floor": RED}


def draw(document: Mapping[str, Any], out: Path) -> None:
    """Write a PNG, SVG or PDF, by the suffix of ``out``.

    Args:
        document: the benchmark's JSON.
    """
    rows = {**document["arms"], "floor": document["floor"]}
    drawn = {arm: rows[arm] for arm in _COLOURS if (rows.get(arm) or {}).get("available", True)}
    shown = {arm: figures for arm, figures in drawn.items() if figures is not None}
    figure = new_figure(8.4, 3.6)
    panels = figure.subplots(1, 2)
    measures = {
        "tokens prefilled, mean": [figures["prefilled_tokens"] for figures in shown.values()],
        "ms to the first token, median": [each["ttft_ms"]["p50"] for each in shown.values()],
    }
    for panel, (label, values) in zip(panels, measures.items(), strict=True):
        panel.bar(list(shown), values, color=[_COLOURS[arm] for arm in shown])
        panel.set_yscale("log")
        panel.set_ylabel(label, color=INK)
        frame(panel)
    save_figure(figure, out)
