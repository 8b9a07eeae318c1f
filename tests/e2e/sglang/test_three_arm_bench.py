"""``leyline bench three-arm`` on a real server, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leyline_lab.engines.sglang import SGLANG
from leyline_lab.errors import EngineProcessError
from leyline_proxy.cli import build_app


@pytest.mark.nightly
def test_the_arms_part_where_they_should(tmp_path: Path) -> None:
    """Splice gives what the contract says, the control far from it; nothing is prefilled twice."""
    try:
        SGLANG.python()
    except EngineProcessError:
        pytest.skip("SGLang isn't installed here: make sglang-setup")
    out = tmp_path / "figures.json"
    size = ["--concurrency", "2", "--scale", "0.05", "--samples", "2", "--boundary", "3"]
    written = ["--json", str(out), "--log", str(tmp_path / "log")]
    done = CliRunner().invoke(build_app(), ["bench", "three-arm", *size, *written])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())["2"]
    assert found["kv_dtype"] == "float32"
    assert found["goal"]["prefilled"]["met"] and found["edit"]["goal"]["prefilled"]["met"]
    assert found["splice"]["spliced_tokens"] > 0.4 * found["splice"]["prompt_tokens"]
    assert found["off"]["hit_ratio"] == 0
    assert 0.4 < found["radix"]["hit_ratio"] < 0.7
    for arm in ("off", "radix", "splice"):
        assert found[arm]["logit_delta"] < 1e-3
    assert found["naive"]["logit_delta"] > 0.1


@pytest.mark.nightly
def test_the_arms_part_in_fp8_as_well(tmp_path: Path) -> None:
    """Splice is as near to fp32 as prefilled FP8 is, the control far from it."""
    try:
        SGLANG.python()
    except EngineProcessError:
        pytest.skip("SGLang isn't installed here: make sglang-setup")
    out = tmp_path / "figures.json"
    size = ["--concurrency", "2", "--scale", "0.05", "--samples", "2", "--boundary", "3"]
    kept = ["--kv-cache-dtype", "fp8_e4m3", "--page-size", "16"]
    written = ["--json", str(out), "--log", str(tmp_path / "log")]
    done = CliRunner().invoke(build_app(), ["bench", "three-arm", *size, *kept, *written])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())["2"]
    assert found["kv_dtype"] == "float8_e4m3fn"
    assert found["goal"]["prefilled"]["met"] and found["edit"]["goal"]["prefilled"]["met"]
    assert found["splice"]["logit_delta"] < 2 * found["off"]["logit_delta"]
    assert found["naive"]["logit_delta"] > 3 * found["splice"]["logit_delta"]
