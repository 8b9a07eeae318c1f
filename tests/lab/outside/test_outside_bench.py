"""``leyline bench outside`` from end to end: real proxies, a real engine, a scripted model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from outside_agent import CRASH, TASKS
from outside_kit import Harness, scripted_engines

from leyline_lab.outside.benchmarks import ComplexityTrap, LocaBench

pytestmark = pytest.mark.nightly

FORMAT = ("--results", "debug-gym", "--arms", "re-prefill,splice")


@dataclass(frozen=True)
class Story:
    """A comparison that was interrupted, continued, and asked for again without its engine."""

    out: Path
    crashed: tuple[int, str]
    left_behind: frozenset[str]
    finished: tuple[int, str]
    again: tuple[int, str]
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def story(out: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Play the story once for all tests."""
    with scripted_engines(tmp_path_factory.mktemp("model")) as origin:
        harness = Harness(origin, out)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(CRASH, "beta")
            # Of no effect: the arms alone decide.
            patch.setenv("LEYLINE_SPLICE", "false")
            crashed = harness(*FORMAT)
            left = frozenset(path.name for path in (out / "re-prefill" / "run-1").iterdir())
            patch.delenv(CRASH)
            finished = harness(*FORMAT)
    summary = out / "summary.json"
    before = json.loads(summary.read_text()) if summary.exists() else {}
    return Story(out, crashed, left, finished, harness(*FORMAT), before)


def test_arms_differ_in_splicing_alone(story: Story) -> None:
    """Both arms send the same prompts and solve the same tasks; only the splice arm splices, and it
    prefills less."""
    assert story.finished[0] == 0, story.finished[1]
    first, second = (story.summary["arms"][arm] for arm in ("re-prefill", "splice"))
    assert first["spliced"] == 0
    assert second["spliced"] > 200
    assert second["prefilled"] < 0.9 * first["prefilled"]
    assert second["served_share"] > first["served_share"]
    assert [first["solved"], second["solved"]] == [1, 1]
    assert [first["attempts"], second["attempts"]] == [2, 2]
    assert first["prompt_tokens"] == second["prompt_tokens"]
    assert first["generated"] == second["generated"] > 0
    assert first["edits"] > 0
    assert story.summary["paired"]["splice"]["pairs"] == 2
    assert story.summary["paired"]["splice"]["wins"] == 0
    assert story.summary["arms"]["splice"]["settings"]["LEYLINE_SPLICE"] == "true"
    assert "50.0% of 2" in story.finished[1]
    assert "9.4 to 90.5" in story.finished[1]


def test_a_crash_is_one_line_and_leaves_no_result(story: Story) -> None:
    """The line has the status and the benchmark's last words, and the run isn't finished."""
    code, output = story.crashed
    assert code == 2
    assert "ended with status 1: out of memory at beta" in output
    assert "Traceback" not in output
    assert "run.json" not in story.left_behind
    assert "part-1.json" in story.left_behind


def test_finished_tasks_and_runs_are_not_run_again(story: Story) -> None:
    """After the crash only the other tasks are played, their tokens are added to the first part's,
    and a third call needs no engine."""
    for arm in ("re-prefill", "splice"):
        played = (story.out / arm / "run-1" / "played.txt").read_text().split()
        assert played == list(TASKS)
    arms = story.summary["arms"]
    assert (arms["re-prefill"]["parts"], arms["splice"]["parts"]) == (2, 1)
    assert arms["re-prefill"]["requests"] == arms["splice"]["requests"] == 10
    assert any("continued" in note for note in story.summary["notes"])
    assert story.again[0] == 0, story.again[1]
    assert json.loads((story.out / "summary.json").read_text()) == story.summary


def test_the_other_formats_are_read_from_the_same_run(story: Story) -> None:
    """The readers of all three benchmarks find the same verdicts in the files of one run."""
    folder = story.out / "splice" / "run-1"
    loca = LocaBench().scores(folder)
    trap = ComplexityTrap().scores(folder)
    assert [loca[f"{task}/state0"].solved for task in TASKS] == [True, False]
    assert [trap[task].solved for task in TASKS] == [True, False]


def test_no_key_or_text_is_in_the_figures(story: Story) -> None:
    """Summary, plan and accounts hold neither the proxy's keys nor a word of the prompts."""
    texts = [path.read_text() for path in story.out.rglob("*.json") if "results" not in path.parts]
    assert len(texts) > 4
    assert not [text for text in texts if "API_KEY" in text or "page" in text]


def test_another_plan_gets_another_folder(story: Story) -> None:
    """A folder with figures refuses a plan that they don't belong to."""
    code, output = Harness("http://127.0.0.1:9", story.out)(
        "--results", "debug-gym", "--workers", "9"
    )
    assert code == 2
    assert "another plan (workers)" in output
