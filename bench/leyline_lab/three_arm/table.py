"""The three-arm figures for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ..tables import figures_table, met, milliseconds
from .figures import BenchArm

_COLUMNS = ("hit\nratio", "spliced", "prefilled", "TTFT\np50", "p90", "e2e\np50", "logit\ndelta")


def print_levels(console: Console, document: Mapping[str, Any], title: str) -> None:
    """Print a table of the replay and one of the edit, then the goals."""
    for phase in ("replay", "edit"):
        table = figures_table(f"{title}: {phase}", ("at\nonce", "arm"), _COLUMNS)
        for concurrency, level in document.items():
            _add_rows(table, concurrency, level if phase == "replay" else level["edit"])
        console.print(table)
        for concurrency, level in document.items():
            figures = level if phase == "replay" else level["edit"]
            for name, goal in figures["goal"].items():
                console.print(
                    f"{concurrency:>3} at once, {phase}, {name}: "
                    f"{goal['measured']} of at most {goal['bound']}: {met(goal['met'])}",
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
