"""The control of the three-arm benchmark: who gets it, and what it does to a copy."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from leyline_lab.three_arm import unrotated


class _Pool:
    """Notes what it is asked to splice."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.tensors = SimpleNamespace(bytes_per_token=7)

    def splice(self, source: Any, target: Any, source_start: int, dest_start: int) -> None:
        self.asked.append((source_start, dest_start))


def test_only_sessions_of_the_control_are_left_unrotated() -> None:
    """Its copies are where they were, as the pool sees it; the pool itself is put back."""
    pool = _Pool()
    splicer = SimpleNamespace(_pool=pool)

    def original(own: Any, turn: Any, length: int) -> None:
        own._pool.splice(None, None, 700, 600 + length)
        assert own._pool.tensors.bytes_per_token == 7

    for session in (("scope", "unrotated.1"), ("unrotated", "mine"), None):
        unrotated.copy(original, splicer, SimpleNamespace(session=session), 5)
    assert pool.asked == [(605, 605), (700, 605), (700, 605)]
    assert splicer._pool is pool


def test_the_folder_brings_the_plugin(tmp_path: Path) -> None:
    """A Python with the folder on its path finds the entry point, and it can be loaded."""
    unrotated.write_distribution(tmp_path / "control")
    (found,) = distributions(path=[str(tmp_path / "control")])
    (point,) = found.entry_points
    assert (point.group, point.load()) == ("sglang.srt.plugins", unrotated.register)
