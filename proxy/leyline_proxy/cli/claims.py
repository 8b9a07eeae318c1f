"""``leyline claims NAME``: tests of the claim contract, found by entry point."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

CLAIMS_GROUP = "leyline.claims"
"""Group of entry points: functions with typer's annotations, cheap to import."""


def register(app: typer.Typer) -> None:
    """Add the group and one command per entry point."""
    claims = typer.Typer(no_args_is_help=True, help="Test whether an engine keeps its claims.")
    for point in sorted(entry_points(group=CLAIMS_GROUP), key=lambda point: point.name):
        claims.command(point.name)(point.load())
    # Typer raises an error for a group without a command.
    if claims.registered_commands:
        claims.callback()(_group)
        app.add_typer(claims, name="claims")


def _group() -> None:
    """Keep the commands in a group, even if there is only one."""
