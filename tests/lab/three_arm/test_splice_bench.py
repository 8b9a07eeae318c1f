"""``leyline bench splice-kernel``: what it measures, and the figures it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leyline_lab.harness.statistics import median_interval
from leyline_lab.splice_kernel import _extrapolate
from leyline_proxy.cli import build_app


def test_the_command_writes_the_figures_of_every_length(tmp_path: Path) -> None:
    """Found by entry point; each length has its times, their ratio and the bytes moved."""
    out = tmp_path / "new" / "figures.json"
    arguments = ["bench", "splice-kernel", "--max-tokens", "2500", "--repeat", "6"]
    result = CliRunner().invoke(build_app(), [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert list(figures) == ["1024", "2048"]
    for length, found in figures.items():
        assert found["bytes"] == int(length) * 4 * (64 + 32) * 4  # layers, latent and key, fp32
        assert found["ratio_to_copy"] == pytest.approx(found["splice_us"] / found["copy_us"])
        for way in ("splice", "copy"):
            low, high = found[f"{way}_us_95"]
            assert 0 < low <= found[f"{way}_us"] <= high
        assert found["prefill_us"] > found["splice_us"]
    assert figures["1024"]["prefill_measured"]


def test_an_unknown_model_is_told_and_no_traceback(tmp_path: Path) -> None:
    """A wrong folder ends the command with its reason."""
    arguments = ["bench", "splice-kernel", "--model", str(tmp_path / "none")]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 2
    assert "is no folder with a model" in " ".join(result.output.split())


def test_the_interval_encloses_the_median_by_rank() -> None:
    """Fifteen repetitions: the median is the eighth, its 95 % interval the fourth to twelfth."""
    assert median_interval([float(value) for value in range(15, 0, -1)]) == (8.0, 4.0, 12.0)
    assert median_interval([1.0, 2.0, 3.0, 9.0])[0] == 2.5


def test_longer_prefills_follow_the_parabola_of_those_that_ran() -> None:
    """Linear and quadratic cost are distinguished; noise can't bend the curve downwards."""
    seen = {1000: 3.0 + 2.0, 2000: 6.0 + 8.0}
    assert _extrapolate(seen, 4000) == pytest.approx(12.0 + 32.0)
    assert _extrapolate({1000: 5.0}, 4000) == pytest.approx(20.0)
    assert _extrapolate({1000: 5.0, 2000: 9.0}, 4000) == pytest.approx(18.0)
