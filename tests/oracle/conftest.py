"""Makes the oracle's own modules importable, and shares its tiny models between tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "support"))

from oracle_models import OracleModel, build_model
from support.integrity import engines_are_whole

__all__ = ["OracleModel", "engines_are_whole", "oracle_model"]


@pytest.fixture(scope="module", autouse=True)
def _few_threads() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and a fixed number keeps bits comparable."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def oracle_model() -> Callable[[str], OracleModel]:
    """Tiny random models by name, built once."""
    return lru_cache(maxsize=None)(build_model)
