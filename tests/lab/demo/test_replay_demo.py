"""The demonstration, as a newcomer runs it."""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leyline_lab.demo import DEFAULT_POLICY
from leyline_lab.demo.recall import QUESTIONS, ask_all
from leyline_lab.demo.run import run_against, shipped_trace
from leyline_lab.engines.stack import StackOptions, running_stack
from leyline_lab.replay.driver import ChatDriver
from leyline_lab.replay.results import Arm, summarise
from leyline_lab.stand_ins.random_models import RandomKind, build_random
from leyline_proxy.cli.main import build_app


def test_demo_runs_both_arms(tmp_path: Path) -> None:
    """``leyline demo`` sends a server per arm the same edited prompts, prints the table
    and writes the picture."""
    picture = tmp_path / "out" / "demo.png"
    early = ["--limit", "4", "--policy", "truncate_older_than:n=1,max_chars=200"]
    done = CliRunner().invoke(build_app(), ["demo", *early, "--plot", str(picture), "--bars"])
    assert done.exit_code == 0, done.output
    for part in (
        "no cache",
        "radix",
        "splice",
        "Leyline reused",
        "tokens by turn",
        "4 turns twice",
    ):
        assert part in done.output
    table = [line.split() for line in done.output.splitlines()]
    off, radix, splice = (
        next(row for row in table if row[:2] == [arm, "4"]) for arm in ("off", "radix", "splice")
    )
    assert off[2] == radix[2] == splice[2]  # prompt tokens, of which a policy may not take more
    assert radix[4] == "0" != splice[4]
    rows = [line.split() for line in done.output.splitlines() if "What is `" in line]
    assert len(rows) == 4
    for row in rows[:2]:  # in sight: expected, and given by both arms
        assert row[3:] == [QUESTIONS[row[2].strip("`=?")]] * 3
    for row in rows[2:]:  # cut: text that was prefilled again can't show it
        assert row[3:6] == ["a", "look-up", "(was"] and row[7:9] == ["a", "look-up"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_demo_against_a_running_stack() -> None:
    """With an address, the policy travels with each request, and edits are spliced."""
    trace = shipped_trace().first(9)
    with running_stack(StackOptions(), splice=True) as stack:
        shown = run_against(stack.origin, "demo", trace, DEFAULT_POLICY, lambda arm, done: None)
    assert set(shown.runs) == {Arm.OFF, Arm.SPLICE}
    total = summarise(shown.runs[Arm.SPLICE])
    assert total.requests == 9 and total.spliced_tokens > 0
    answers = shown.answers[Arm.SPLICE]
    assert {answer.question.in_sight for answer in answers} == {True, False}
    assert not any(answer.wrong for answer in answers)


def test_nothing_is_asked_without_an_expectation(tmp_path: Path) -> None:
    """A model that doesn't know the task, or a policy of the stack's own, gets no questions."""
    folder = build_random(RandomKind.LLAMA, tmp_path / "other")
    with (
        running_stack(StackOptions(model=str(folder)), splice=True) as stack,
        closing(ChatDriver(stack.base_url)) as driver,
    ):
        assert driver.model == "other"
        assert ask_all(driver, DEFAULT_POLICY) == ()
        driver.model = "leyline-recall"
        assert ask_all(driver, "not_installed_here") == ()


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_demo_looks_for_its_engine_first(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyTorch nothing begins: the message has the command that installs it."""
    known = find_spec
    monkeypatch.setattr(
        "leyline_lab.demo.run.find_spec", lambda name: None if name == package else known(name)
    )
    done = CliRunner().invoke(build_app(), ["demo"])
    assert done.exit_code == 2
    words = " ".join(done.output.split())
    assert f"needs the package '{package}'" in words
    assert "pip install" in words


def test_demo_says_when_nothing_answers() -> None:
    """A wrong address ends with status 1 and one line."""
    done = CliRunner().invoke(build_app(), ["demo", "--url", "http://127.0.0.1:9", "--limit", "1"])
    assert done.exit_code == 1
    assert "leyline demo: no OpenAI-compatible service at" in done.output
