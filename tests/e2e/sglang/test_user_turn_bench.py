"""``leyline bench user-turn`` on real servers, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leyline_lab.engines.sglang import SGLANG
from leyline_lab.errors import EngineProcessError
from leyline_proxy.cli import build_app


@pytest.mark.nightly
@pytest.mark.parametrize("calls", ["20", "100"])
def test_the_goals_are_met_and_the_servers_own_flag_saves_nothing(
    calls: str, tmp_path: Path
) -> None:
    """Leyline prefills what is new; without generated tokens, the server prefills no less than with
    them after the user's message, and more in the loop."""
    try:
        SGLANG.python()
    except EngineProcessError:
        pytest.skip("SGLang isn't installed here: make sglang-setup")
    out = tmp_path / "turns.json"
    size = ["--calls", calls, "--sessions", "1", "--user-turns", "2"]
    written = ["--json", str(out), "--log", str(tmp_path / "log")]
    done = CliRunner().invoke(
        build_app(), ["bench", "user-turn", "--engine", "sglang", *size, *written]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert all(goal["met"] for goal in document["goal"].values()), document["goal"]
    radix, strip, splice = (document["arms"][name] for name in ("radix", "strip", "splice"))
    assert strip["prefilled_tokens"] >= radix["prefilled_tokens"] > 5 * splice["prefilled_tokens"]
    assert strip["loop_prefilled_tokens"] > radix["loop_prefilled_tokens"] + 20
    assert splice["loop_prefilled_tokens"] == pytest.approx(radix["loop_prefilled_tokens"], abs=2)
    assert radix["agreement"]["tokens"] == strip["agreement"]["tokens"] == 1
    assert splice["agreement"]["tokens"] >= 0.9
