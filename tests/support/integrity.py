"""Every engine that a test makes is checked for leaks when the test ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from leyline_replay.engine import ReplayEngine


@pytest.fixture(autouse=True)
def engines_are_whole(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """After each test its engines own every slot once; tests marked ``damages`` break that."""
    made: list[ReplayEngine] = []
    begin = ReplayEngine.__init__

    def remember(self: ReplayEngine, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(ReplayEngine, "__init__", remember)
    yield
    if request.node.get_closest_marker("damages") is None:
        for engine in made:
            engine.check_integrity()
