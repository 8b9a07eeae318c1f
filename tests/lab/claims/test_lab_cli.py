"""The laboratory's commands, ``leyline claims``: their files, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from leyline_engine.claims.events import AnyEvent
from leyline_lab.claims import command
from leyline_lab.claims.reader import read
from leyline_lab.claims.verdict import TraceVerdict
from leyline_proxy.cli import build_app


def run(*arguments: str) -> Result:
    """Run ``leyline claims`` with these arguments."""
    return CliRunner().invoke(build_app(), ["claims", *arguments])


def test_litmus_writes_every_case_with_its_events(tmp_path: Path) -> None:
    """Another reader can check the verdicts from the file alone."""
    out = tmp_path / "new" / "litmus.json"
    result = run("litmus", "--engine", "micro", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "13 of 13" in result.output
    document = json.loads(out.read_text(encoding="utf-8"))
    assert (document["engine"], document["passed"], document["of"]) == ("micro", 13, 13)
    for case in document["cases"]:
        assert case["passed"] and case["mutants"] and not case["missed"]
        events = msgspec.convert(case["events"], list[AnyEvent])
        assert read(events) == msgspec.convert(case["verdict"], TraceVerdict)


def test_sweep_writes_figures_and_a_picture(tmp_path: Path) -> None:
    """28 rows as documented, and a PNG."""
    out, plot = tmp_path / "sweep.json", tmp_path / "new" / "sweep.png"
    result = run("sweep", "--engine", "micro", "--json", str(out), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 28
    hard = {row["usable"]: row for row in rows if row["policy"] == "hard"}
    assert (hard[120]["served"], hard[120]["blocking"]) == (False, ["a/c"])
    assert (hard[130]["served"], hard[130]["resident"]) == (True, 60)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["litmus", "sweep"])
def test_an_engine_that_nobody_brings_is_refused_and_the_others_named(name: str) -> None:
    """A usage error, and no figures."""
    result = run(name, "--engine", "llama")
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "no engine is called llama; there are micro, replay, sglang, vllm" in said


@pytest.mark.parametrize("name", ["litmus", "sweep"])
@pytest.mark.parametrize(
    ("engine", "page", "message"),
    [
        ("replay", "8", "pages of replay can't have 8 tokens; choose one of [1, 16, 32, 64, 128]"),
        ("vllm", "16", "pages of vllm can't have 16 tokens; choose one of [32, 64, 128]"),
        ("micro", "16", "the engine micro has pages of its own: leave --page-size out"),
    ],
)
def test_pages_that_an_engine_cannot_have_are_a_usage_error(
    name: str, engine: str, page: str, message: str
) -> None:
    """The sizes are named."""
    result = run(name, "--engine", engine, "--page-size", page)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("name", ["litmus", "sweep"])
def test_an_engine_that_is_not_installed_is_said_to_be_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the missing package."""
    monkeypatch.setattr(command, "ENGINES", {"sglang": ("no_such_package.runtime", "open")})
    result = run(name, "--engine", "sglang")
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "the engine sglang is not installed here: No module named 'no_such_package'" in said


@pytest.mark.nightly
def test_the_replay_engine_plays_the_splicing_cases_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block allocator has nothing to splice, and isn't asked to."""
    monkeypatch.setattr(command, "CASES", command.CASES[:1])
    out = tmp_path / "litmus.json"
    result = run("litmus", "--engine", "replay", "--json", str(out))
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text(encoding="utf-8"))
    assert (document["engine"], document["passed"], document["of"]) == ("replay", 2, 2)
    names = [case["name"] for case in document["cases"]]
    assert names == ["ordinary_eviction", "claim_over_a_spliced_span"]
    assert "1 of 1" in run("litmus", "--engine", "micro").output


def test_a_failed_case_is_told_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is shown beside the expectation."""
    first, *rest = command.CASES
    broken = replace(first, outcomes=first.outcomes[:-1])
    monkeypatch.setattr(command, "CASES", (broken, *rest))
    result = run("litmus")
    assert result.exit_code == 1
    assert "12 of 13" in result.output and "FAILED" in result.output


def test_a_picture_of_no_known_kind_is_a_usage_error(tmp_path: Path) -> None:
    """The suffix is named."""
    result = run("sweep", "--plot", str(tmp_path / "sweep.doc"))
    assert result.exit_code == 2
    assert "sweep.doc has no suffix of a picture" in " ".join(result.output.split())
