"""``leyline bench outside`` in front of a scripted server: one arm, and its failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from outside_agent import WAIT
from outside_kit import Harness
from support.fake_engine import MODEL, Answer, FakeEngine, chat_json

from leyline_lab.stand_ins.serving import serving

ONE_ARM = ("--results", "debug-gym", "--arms", "re-prefill", "--model", MODEL)


def test_an_arm_runs_and_is_scored(tmp_path: Path) -> None:
    """A real proxy serves the agent, its account is the engine's, and the score is the agent's."""
    engine = FakeEngine()
    engine.answers = [chat_json("It is 41."), chat_json("I don't know.")]
    with serving(engine) as origin:
        code, output = Harness(origin, tmp_path / "out", empties=False)(*ONE_ARM)
    assert code == 0, output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    figures = summary["arms"]["re-prefill"]
    assert (figures["solved"], figures["attempts"], figures["requests"]) == (1, 2, 2)
    assert (figures["cached"], figures["prefilled"], figures["prompt_tokens"]) == (8, 12, 20)
    assert (summary["paired"], len(engine.bodies)) == ({}, 2)
    # The caller of the engine is the proxy: the key that the agent had never goes there.
    assert "authorization" not in engine.headers[0]


def test_a_dead_endpoint_is_one_line(tmp_path: Path) -> None:
    """Nothing is run, and nothing but the plan is written."""
    code, output = Harness("http://127.0.0.1:9", tmp_path / "out")(*ONE_ARM)
    assert code == 2
    assert "no engine answers at http://127.0.0.1:9" in output
    assert len(output.strip().splitlines()) == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "plan.json"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "other"), f"serves no model 'other'; it serves {MODEL}"),
        (("--arms", "splice"), "runs without the Leyline plugin"),
    ],
)
def test_an_engine_that_cannot_serve_the_arms_is_refused(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    """The engine is asked before anything is started."""
    with serving(FakeEngine(capability=None)) as origin:
        code, output = Harness(origin, tmp_path / "out")(*ONE_ARM, *options)
    assert code == 2
    assert words in output
    assert len(output.strip().splitlines()) == 1


@pytest.mark.nightly
def test_a_benchmark_that_ignores_the_proxy_has_no_figures(tmp_path: Path) -> None:
    """Scores without a request through the proxy are refused: another server made them."""
    lines = '{"task": "a", "solved": true}'
    agent = f"""sh -c 'echo {json.dumps(lines)} > "$BENCH_FOLDER/results.jsonl"'"""
    with serving(FakeEngine()) as origin:
        harness = Harness(origin, tmp_path / "out", empties=False)
        code, output = harness(*ONE_ARM, "--results", "lines", "--command", agent)
    assert code == 2
    assert "no request of the benchmark came through the proxy" in output
    assert not list((tmp_path / "out").rglob("run.json"))


@pytest.mark.nightly
def test_an_engine_that_goes_away_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark is stopped after the patience that was asked for, and nothing is finished."""
    monkeypatch.setenv(WAIT, "beta")
    engine = FakeEngine()
    marker = tmp_path / "out" / "re-prefill" / "run-1" / "agent.pid"

    def goes() -> None:
        until(marker.exists)
        engine.models = []
        engine.scripted["/"] = Answer(status=503)

    with serving(engine) as origin, ThreadPoolExecutor() as pool:
        pool.submit(goes)
        harness = Harness(origin, tmp_path / "out", empties=False)
        code, output = harness(*ONE_ARM, "--patience", "1")
    assert code == 2
    assert "the engine didn't answer for 1 s; run the same command again" in output
    assert not list((tmp_path / "out").rglob("run.json"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition, for a minute at most."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.nightly
def test_a_terminated_command_stops_what_it_started(tmp_path: Path) -> None:
    """SIGTERM leaves no agent, ends with status 130, and keeps the account."""
    out = tmp_path / "out"
    with serving(FakeEngine()) as origin:
        arguments = Harness(origin, out, empties=False).arguments(*ONE_ARM)
        code = (
            "import sys, typer; from leyline_lab.outside.command import command; "
            "app = typer.Typer(); app.command()(command); app()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=os.environ | {WAIT: "beta"},
            stderr=subprocess.PIPE,
            text=True,
        )
        marker = out / "re-prefill" / "run-1" / "agent.pid"
        try:
            until(lambda: marker.exists() or process.poll() is not None)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "interrupted; run the same command again to continue" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)
    part = json.loads((marker.parent / "part-1.json").read_text())
    assert part["ended"] is True
    assert part["account"]["requests"] == 1
