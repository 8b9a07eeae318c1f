"""``leyline claims litmus`` and ``sweep``: the contract of claims, tested on engines."""

from __future__ import annotations

import typer

from ..claims.command import app as claims


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(claims, name="claims")
