"""Fixtures of the stores of evicted texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from parts_kit import KINDS, Place, places


@pytest.fixture(scope="session")
def place_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Place]]:
    """Makes fresh places."""
    with places(tmp_path_factory.mktemp("parts")) as made:
        yield made


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, place_of: Callable[[str], Place]) -> Place:
    """A fresh place of each kind."""
    return place_of(request.param)
