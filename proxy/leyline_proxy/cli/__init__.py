"""The ``leyline`` command."""

from __future__ import annotations

from .main import build_app, main

__all__ = ["build_app", "main"]
