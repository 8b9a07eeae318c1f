"""Spans that a test makes."""

from __future__ import annotations

import pytest
from support.tracing import Recorder


@pytest.fixture
def recorder() -> Recorder:
    """Keeps the spans that end."""
    return Recorder()
