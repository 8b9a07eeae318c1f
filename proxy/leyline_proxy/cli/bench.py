"""``leyline bench NAME``: benchmarks of the installed packages, found by entry point."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

BENCH_GROUP = "leyline.benches"
"""Entry points of this group are functions with typer's annotations; importing one is cheap."""


def register(app: typer.Typer) -> None:
    """Add the group and one command per entry point."""
    bench = typer.Typer(no_args_is_help=True, help="Measure a part of the engine on this machine.")
    for point in sorted(entry_points(group=BENCH_GROUP), key=lambda point: point.name):
        bench.command(point.name)(point.load())
    # A group without a command is an error of typer's own.
    if bench.registered_commands:
        bench.callback()(_group)
        app.add_typer(bench, name="bench")


def _group() -> None:
    """Keeps the commands a group, also when there is only one."""
