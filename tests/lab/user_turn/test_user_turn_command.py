"""``leyline bench user-turn`` on the replay engine: its document, and a control that fails it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from leyline_lab.user_turn.command import command
from leyline_proxy.model.undeclared import UndeclaredRules


def run(*options: str) -> Result:
    """Run the command."""
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(options))


def measured(out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The document of a small run, and what it printed."""
    found = run("--calls", "3", "--sessions", "1", "--json", str(out / "turns.json"), *options)
    assert found.exit_code == 0, found.output
    document: dict[str, Any] = json.loads((out / "turns.json").read_text())
    return document, found.output


@pytest.mark.nightly
def test_leyline_prefills_what_is_new_and_a_prefix_cache_the_loop(tmp_path: Path) -> None:
    """Goals are met, answers are those of a full prefill, and the arm of SGLang has a reason."""
    plot = tmp_path / "turns.png"
    document, printed = measured(tmp_path, "--user-turns", "2", "--plot", str(plot))
    assert plot.stat().st_size > 10_000
    assert printed.count(": met") == 2 and "strip: not available" in printed
    arms = document["arms"]
    assert not arms["strip"]["available"] and "--engine sglang" in arms["strip"]["reason"]
    radix, splice, full, floor = arms["radix"], arms["splice"], arms["full"], document["floor"]
    for figures in (radix, splice, full, floor):
        kinds = ("cached_tokens", "spliced_tokens", "prefilled_tokens")
        assert sum(figures[kind] for kind in kinds) == pytest.approx(figures["prompt_tokens"])
        assert figures["requests"] == 2 and figures["ttft_ms"]["p50"] > 0
    assert splice["prefilled_tokens"] == splice["changed_and_new_tokens"] < 30
    assert floor["prefilled_tokens"] == pytest.approx(splice["prefilled_tokens"], abs=8)
    assert radix["prefilled_tokens"] > 5 * splice["prefilled_tokens"]
    assert full["prefilled_tokens"] >= full["prompt_tokens"] - 8
    assert splice["unchanged_reused"] >= 0.99 and radix["unchanged_reused"] < 0.9
    assert radix["agreement"]["tokens"] == 1 and radix["agreement"]["logit_delta"] < 1e-3
    assert splice["agreement"]["answers"] == 1
    # It has read the thinking, so it isn't a full prefill.
    assert splice["agreement"]["logit_delta"] > radix["agreement"]["logit_delta"]


@pytest.mark.nightly
def test_exact_edits_miss_the_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a proxy that doesn't splice stripped thinking prefills the loop, and that shows."""
    monkeypatch.setattr(UndeclaredRules, "amortizes", lambda *_: False)
    document, printed = measured(tmp_path, "--user-turns", "1")
    goal = document["goal"]
    assert not goal["prefilled_beyond"]["met"] and not goal["unchanged_reused"]["met"]
    assert printed.count("NOT MET") == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--url", "http://127.0.0.1:1"], "--engine sglang"),
        (["--user-turns", "99"], "at most 40"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_wrong_options_end_with_a_message(options: list[str], said: str) -> None:
    """Nothing is measured, and the exit status is 2."""
    found = run("--calls", "1", "--sessions", "1", *options)
    assert found.exit_code == 2, found.output
    assert said in found.output
