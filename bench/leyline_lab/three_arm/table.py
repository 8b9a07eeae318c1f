"""The three-arm figures for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..replay.table import milliseconds
from .figures import BenchArm

_COLUMNS = ("hit\nratio", "spliced", "prefilled", "TTFT\np50", "p90", "e2e\np50", "logit\ndelta")


def print_levels(console: Console, document: Mapping[str, Any], title: str) -> None:
    """Print a table of the replay and one of the edit, then the goals."""
    for phase in ("replay", "edit"):
        table = Table(
            title=f"{title}: {phase}",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.add_column("at\nonce", justify="right", no_wrap=True)
        table.add_column("arm", no_wrap=True)
        for name in _COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for concurrency, level in document.items():
            _add_rows(table, concurrency, level if phase == "replay" else level["edit"])
        console.print(table)
        for concurrency, level in document.items():
            figures = level if phase == "replay" else level["edit"]
            for name, goal in figures["goal"].items():
                verdict = "met" if goal["met"] else "NOT MET"
                console.print(
                    f"{concurrency:>3} at once, {phase}, {name}: "
                    f"{goal['measured']} of at most {goal['bound']}: {verdict}",
                    highlight=False,
                )


def _add_rows(table: Table, concurrency: str, figures: Mapping[str, Any]) -> None:
    for arm in BenchArm:
        found = figures.get(arm.value)
        if found is None:
            continue
        delta = found["logit_delta"]
        table.add_row(
            concurrency,
            arm.value,
            f"{found['hit_ratio']:.1%}",
            f"{found['spliced_tokens']:,.0f}",
            f"{found['prefilled_tokens']:,.0f}",
            milliseconds(found["ttft_ms"]["p50"]),
            milliseconds(found["ttft_ms"]["p90"]),
            milliseconds(found["e2e_ms"]["p50"]),
            "–" if delta is None else f"{delta:.1e}",
        )
    if (floor := figures.get("floor")) is not None:
        table.add_row(
            concurrency,
            "floor",
            "",
            "",
            f"{floor['must_prefill_tokens']:,.0f}",
            milliseconds(floor["ttft_ms"]["p50"]),
            milliseconds(floor["ttft_ms"]["p90"]),
            "",
            "",
            end_section=True,
        )
