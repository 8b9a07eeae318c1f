"""Fixtures of the comparisons by outside benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of the module's comparison."""
    return tmp_path_factory.mktemp("outside") / "out"
