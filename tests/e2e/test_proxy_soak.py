"""Half an hour of agents before a real proxy process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "proxy_soak.py"


@pytest.mark.nightly
def test_memory_stays_flat_and_every_request_is_answered(tmp_path: Path) -> None:
    """Twenty sessions side by side, with edits, for thirty minutes."""
    out = tmp_path / "soak.json"
    command = [sys.executable, str(BENCH), "--minutes", "30", "--json", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=2700, check=False)
    assert out.exists(), ran.stderr
    result = json.loads(out.read_text())
    assert result["flat"] and not result["wrong"], result
    assert result["outcomes"]["spliced"] > 100
