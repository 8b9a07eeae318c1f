"""The path of a test's log."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The log's file, which isn't there yet."""
    return tmp_path / "audit.jsonl"
