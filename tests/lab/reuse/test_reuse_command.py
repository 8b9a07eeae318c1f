"""``leyline bench reuse`` on the replay engine: its document, the goal, and what breaks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from leyline_engine.reuse.index import ReuseIndex
from leyline_lab.reuse.command import command

MEASURES = {"ttft_ratio_to_radix", "kl", "argmax_match", "first_divergence"}
SHARES = {"prefix", "additional", "total", "recoverable"}
TOKENS = 4


def measured(out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The patterns of a small run, and what it printed."""
    app = typer.Typer()
    app.command()(command)
    small = ["--requests", "4", "--scale", "0.5", "--tokens", str(TOKENS)]
    result = CliRunner().invoke(app, [*small, "--json", str(out / "reuse.json"), *options])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads((out / "reuse.json").read_text())
    return document["patterns"], result.output


def test_the_document_has_every_measure(tmp_path: Path) -> None:
    """Shares add up and meet the goal, reuse is closer to a full prefill than the control, and
    other methods find less."""
    plot = tmp_path / "reuse.png"
    options = ("--patterns", "agent_meta,tool_variants", "--plot", str(plot))
    patterns, printed = measured(tmp_path, *options)
    assert list(patterns) == ["agent_meta", "tool_variants"]
    assert plot.stat().st_size > 10_000
    assert printed.count(": met") == 2
    for figures in patterns.values():
        assert figures.keys() >= SHARES | MEASURES
        assert figures["total"] == pytest.approx(
            figures["prefix"] + figures["additional"], abs=1e-5
        )
        assert figures["total"] >= figures["prefix"] + 0.98 * figures["recoverable"]
        assert figures["goal_met"] is True
        assert figures["recoverable"] > 0.3
        assert figures["ttft_ratio_to_radix"] > 0
        assert 0 <= figures["argmax_match"] <= 1
        assert 0 <= figures["first_divergence"] <= TOKENS
        arms = figures["arms"]
        assert 0 <= figures["kl"] == arms["leyline"]["kl"] < arms["naive"]["kl"]
        for other in ("cdc", "lmcache"):
            assert 0 <= arms[other]["additional"] < figures["additional"]


def test_an_index_that_finds_nothing_misses_the_goal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: what could be reused doesn't depend on the index, so an empty one is noticed."""
    monkeypatch.setattr(ReuseIndex, "places", lambda *_: iter(()))
    patterns, printed = measured(tmp_path, "--patterns", "clock")
    figures = patterns["clock"]
    assert (figures["additional"], figures["goal_met"]) == (0, False)
    assert figures["recoverable"] > 0.3
    assert "MISSED" in printed


def test_unknown_patterns_are_refused(tmp_path: Path) -> None:
    """A wrong name ends the command with the names that there are."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["--patterns", "agents"])
    assert result.exit_code == 2
    assert "agent_meta" in result.output
