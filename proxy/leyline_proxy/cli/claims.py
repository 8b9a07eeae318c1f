"""``leyline claims litmus`` and ``sweep``: the laboratory of claims, which a checkout has."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import typer

_LABORATORY = "leyline_engine.lab"


def register(app: typer.Typer) -> None:
    """Add the group where the laboratory is at hand; the wheel doesn't carry it."""
    if find_spec(_LABORATORY) is not None:
        app.add_typer(import_module(f"{_LABORATORY}.command").app, name="claims")
