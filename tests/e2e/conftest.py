"""What tests end to end share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder in which the tiny model is made once."""
    return str(tmp_path_factory.mktemp("models"))
