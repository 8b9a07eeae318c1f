"""One thread for torch: these tensors are too small to share out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.integrity import engines_are_whole

from leyline_replay import admission

__all__ = ["engines_are_whole"]


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are compared name their lineages alike."""
    monkeypatch.setattr(admission, "token_bytes", bytes)
