"""The figures of ``leyline bench user-turn`` for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..replay.table import milliseconds

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
    table = Table(
        title=f"user turns on {document['engine']}, {document['model']}: {size}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("arm", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
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
        verdict = "met" if goal["met"] else "NOT MET"
        console.print(f"{name}: {goal['measured']}, {bound}: {verdict}", highlight=False)
    for arm, figures in document["arms"].items():
        if not figures["available"]:
            console.print(f"{arm}: not available: {figures['reason']}", highlight=False)


def _cells(figures: Mapping[str, Any]) -> list[str]:
    agreement = figures.get("agreement") or {}
    return [
        _tokens(figures["prompt_tokens"]),
        _tokens(figures["prefilled_tokens"]),
        _tokens(figures.get("changed_and_new_tokens")),
        _percent(figures.get("unchanged_reused")),
        milliseconds(figures["ttft_ms"]["p50"]),
        milliseconds(figures["ttft_ms"]["p90"]),
        _percent(agreement.get("answers")),
        _percent(agreement.get("tokens")),
        _tokens(figures.get("loop_prefilled_tokens")),
    ]


def _tokens(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
