"""``leyline bench NAME``: benchmarks of the installed packages, found by entry point."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

BENCH_GROUP = "leyline.benches"
"""Group of entry points: functions with typer's annotations, cheap to import."""


def register(app: typer.Typer) -> None:
    """Add the group and one command per entry point."""
    bench = typer.Typer(no_args_is_help=True, help="Measure a part of the engine on this machine.")
    for point in sorted(entry_points(group=BENCH_GROUP), key=lambda point: point.name):
        bench.command(point.name)(point.load())
    # Typer raises an error for a group without a command.
    if bench.registered_commands:
        bench.callback()(_group)
        app.add_typer(bench, name="bench")


def _group() -> None:
    """Keep the commands in a group, even if there is only one."""
