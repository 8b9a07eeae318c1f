"""A plugin of the tests' own: each tensor-parallel rank writes down which slots it splices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_FOLDER = "LEYLINE_RANK_PROBE"
_ENTRY_POINTS = "[sglang.srt.plugins]\nleyline_rank_probe = rank_probe:register\n"
_METADATA = "Metadata-Version: 2.1\nName: leyline-rank-probe\nVersion: 0\n"


def probe_environment(folder: Path) -> dict[str, str]:
    """Environment of a server whose ranks write into ``folder``, an empty one."""
    record = folder / "leyline_rank_probe-0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(_METADATA)
    (record / "entry_points.txt").write_text(_ENTRY_POINTS)
    path = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(part for part in path if part), _FOLDER: str(folder)}


def splices(folder: Path) -> list[list[dict[str, Any]]]:
    """Each rank's splices so far, in order; by process."""
    files = sorted(folder.glob("rank-*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def register() -> None:
    """Called by SGLang in each of its processes."""
    from leyline_engine.rows.pool import SplicePool

    spliced = SplicePool.splice
    file = Path(os.environ[_FOLDER]) / f"rank-{os.getpid()}.jsonl"

    def splice(self: Any, source: Any, target: Any, source_start: int, dest_start: int) -> None:
        step = {
            "source": source.tolist(),
            "target": target.tolist(),
            "from": source_start,
            "to": dest_start,
        }
        with file.open("a") as output:
            output.write(json.dumps(step) + "\n")
        spliced(self, source, target, source_start, dest_start)

    SplicePool.splice = splice  # type: ignore[method-assign]
