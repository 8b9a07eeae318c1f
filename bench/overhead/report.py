"""The figures as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]

_COLORS = {
    "direct": "#888888",
    "leyline": "#1f77b4",
    "leyline asks": "#9ecae1",
    "litellm": "#d62728",
    "nginx": "#2ca02c",
}


def table(results: Results) -> Table:
    """Return the figures of one connection, not streamed, and of chunks."""
    shown = Table(title="One connection, not streamed; a direct request's CPU is the upstream's")
    for column in (
        "tokens",
        "system",
        "CPU ms",
        "added p50 ms",
        "added p99 ms",
        "requests/s",
        "upstream requests",
        "CPU µs/chunk",
        "µs/paced chunk",
        "opening CPU ms",
        "RSS MB",
    ):
        shown.add_column(column, justify="left" if column == "system" else "right")
    for size, systems in results.items():
        for system, entry in systems.items():
            detail = entry["detail"]
            shown.add_row(
                size,
                system,
                f"{entry['cpu_ms_per_request']:.2f}",
                f"{entry['added_p50_ms']:.2f}",
                f"{entry['added_p99_ms']:.2f}",
                f"{entry['rps']:.0f}",
                f"{entry['upstream_requests_per_turn']:.2f}",
                f"{entry['cpu_us_per_chunk']:.1f}",
                f"{detail['cpu_us_per_paced_chunk']:.1f}",
                f"{detail['loads']['1']['opening_cpu_ms']:.1f}",
                f"{entry['rss_mb']:.0f}",
            )
        shown.add_section()
    return shown


def draw(results: Results, out: Path) -> None:
    """Draw CPU time, added latency and the cost of chunks, by size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    kinds = (
        ("cpu_ms_per_request", "CPU ms per request"),
        ("added_p50_ms", "added latency, p50, ms"),
        ("added_p99_ms", "added latency, p99, ms"),
        ("cpu_us_per_chunk", "CPU µs per streamed chunk"),
    )
    for axes, (name, title) in zip(figure.subplots(1, len(kinds)), kinds, strict=True):
        systems = [each for each in _COLORS if any(each in entry for entry in results.values())]
        systems.remove("direct")  # it adds nothing
        width = 0.8 / len(systems)
        for number, system in enumerate(systems):
            heights = [max(entry[system][name], 0) for entry in results.values()]
            places = [at + (number - (len(systems) - 1) / 2) * width for at in range(len(heights))]
            bars = axes.bar(places, heights, width, label=system, color=_COLORS[system])
            axes.bar_label(bars, fmt="%.3g", fontsize=7)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(len(results)), list(results))
        axes.set_yscale("log")
        axes.margins(y=0.15)
        axes.tick_params(
            axis="y", which="both", left=False, labelleft=False
        )  # the bars have labels
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.supxlabel("prompt tokens; the bars' heights are logarithmic", fontsize=9)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(out, dpi=150)
