"""``leyline bench reuse`` on a real server, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leyline_lab.engines.sglang import SGLANG
from leyline_lab.errors import EngineProcessError
from leyline_proxy.cli import build_app


@pytest.mark.nightly
def test_the_server_serves_what_is_recoverable(tmp_path: Path) -> None:
    """Both patterns meet the goal, and the control copies as much, but far from a full prefill."""
    try:
        SGLANG.python()
    except EngineProcessError:
        pytest.skip("SGLang isn't installed here: make sglang-setup")
    out = tmp_path / "reuse.json"
    size = ["--requests", "4", "--scale", "0.5", "--tokens", "4", "--patterns", "rerank,clock"]
    written = ["--json", str(out), "--log", str(tmp_path / "log")]
    done = CliRunner().invoke(
        build_app(), ["bench", "reuse", "--engine", "sglang", *size, *written]
    )
    assert done.exit_code == 0, done.output
    assert "not measured" not in done.output
    patterns = json.loads(out.read_text())["patterns"]
    assert list(patterns) == ["rerank", "clock"]
    for figures in patterns.values():
        assert figures["goal_met"] and figures["recoverable"] > 0.2
        naive = figures["arms"]["naive"]
        assert naive["additional"] == pytest.approx(figures["additional"], abs=0.02)
        assert figures["kl"] < naive["kl"] / 3
