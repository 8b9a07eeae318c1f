"""The control of ``leyline bench three-arm``: an SGLang plugin that leaves keys unrotated.

No server loads it until its distribution is put on that server's path:

    python -m leyline_lab.three_arm.unrotated FOLDER
    PYTHONPATH=FOLDER sglang serve …

Then splices of sessions whose names begin with ``unrotated`` copy rows unrotated. All other
sessions are served as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PREFIX = "unrotated"
"""Prefix of the names of the control's sessions."""

_METADATA = "Metadata-Version: 2.1\nName: leyline-unrotated\nVersion: 0\n"
_ENTRY_POINTS = (
    "[sglang.srt.plugins]\nleyline-unrotated = leyline_lab.three_arm.unrotated:register\n"
)


class UnrotatedPool:
    """A pool that copies rows without rotating them to their new positions."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def splice(self, source: Any, target: Any, source_start: int, dest_start: int) -> None:
        """Copy rows; see :meth:`leyline_engine.rows.pool.SplicePool.splice`."""
        self._pool.splice(source, target, dest_start, dest_start)


def register() -> None:
    """Entry point of ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("leyline_engine.sglang.splicer.Splicer._copy", copy, HookType.AROUND)


def copy(original: Callable[..., None], splicer: Any, turn: Any, *args: Any) -> None:
    """Run one copy of a splice, without rotation for the control's turns."""
    session = turn.session
    if session is None or not session[1].startswith(PREFIX):
        original(splicer, turn, *args)
        return
    pool = splicer._pool
    splicer._pool = UnrotatedPool(pool)
    try:
        original(splicer, turn, *args)
    finally:
        splicer._pool = pool


def write_distribution(folder: Path) -> None:
    """Write a distribution into ``folder``; a Python with it on its path loads the control."""
    info = folder / "leyline_unrotated-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA, encoding="utf-8")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")


if __name__ == "__main__":
    write_distribution(Path(sys.argv[1]))
