"""Runs a command of the laboratory: ``python -m leyline_engine.lab``."""

from .command import app

app(prog_name="python -m leyline_engine.lab")
