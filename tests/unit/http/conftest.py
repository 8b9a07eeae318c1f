"""A scripted engine for each test."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    """An engine that answers by script."""
    return FakeEngine()
