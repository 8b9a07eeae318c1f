"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest
from support.integrity import engines_are_whole
from support.torch_threads import one_torch_thread

from leyline_replay import admission

__all__ = ["engines_are_whole", "one_torch_thread"]


@pytest.fixture
def one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are compared name their lineages alike."""
    monkeypatch.setattr(admission, "token_bytes", bytes)
