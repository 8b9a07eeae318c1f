"""A scripted engine, and certificates, for each test."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_engine import FakeEngine
from support.tls_place import TlsPlace


@pytest.fixture
def engine() -> FakeEngine:
    """An engine that answers by script."""
    return FakeEngine()


@pytest.fixture
def place(tmp_path: Path) -> TlsPlace:
    """An authority, and the proxy's certificate."""
    return TlsPlace(tmp_path)
