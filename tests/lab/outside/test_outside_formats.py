"""Readers of the benchmarks' result files, on files in the form that their sources write.

The members are those of debug-gym 1.3.0 (``BaseAgent.build_trajectory``, ``TaskProgress``),
LOCA-bench 8cd474d (``run_single_task``, ``task-configs``), The Complexity Trap bf15b5f
(``RunBatch._run_instance``) and swebench 4.1.0 (``make_run_report``); the values are made up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leyline_lab.errors import PlanError, ResultError
from leyline_lab.outside.benchmarks import (
    ComplexityTrap,
    Custom,
    DebugGym,
    Endpoint,
    Job,
    LocaBench,
)
from leyline_lab.outside.benchmarks.loca_bench import named
from leyline_lab.outside.tasks import Selection, TaskScore, with_missing

SOLVED, UNSOLVED = TaskScore(True), TaskScore(False)
FAILED = TaskScore(False, failed=True)
ENDPOINT = Endpoint("http://127.0.0.1:1/v1", "KEY")


def write(path: Path, value: object) -> None:
    """Write a file as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def trajectory(root: Path, task: str, success: object) -> None:
    """A file of ``save_trajectory``."""
    document = {
        "problem": task,
        "config": {"max_steps": 50, "type": "froggy"},
        "tools": [{"type": "function", "function": {"name": "view"}}],
        "uuid": "0f72",
        "success": success,
        "log": [{"step_id": 0, "content": None, "action": None, "obs": []}],
        "agent_type": "FroggyAgent",
        "logger": f"{task}.log",
    }
    write(root / "results" / task / "trajectory.json", document)


def status(root: Path, task: str, state: str) -> None:
    """A file of ``dump_task_status``."""
    counts = {"step": 7, "total_steps": 50, "score": 0, "max_score": None}
    document = {"problem_id": task, **counts, "status": state, "logdir": f"results/{task}"}
    write(root / "results" / task / f"{task}_status.json", document)


def test_debug_gym_is_scored_by_its_trajectories(tmp_path: Path) -> None:
    """A task without a trajectory, or whose last attempt ended with an error, failed."""
    trajectory(tmp_path, "counter", True)
    status(tmp_path, "counter", "resolved")
    trajectory(tmp_path, "sum_tree", False)
    status(tmp_path, "sum_tree", "unresolved")
    status(tmp_path, "config", "error")
    trajectory(tmp_path, "purr", True)
    status(tmp_path, "purr", "error")
    status(tmp_path, "grader", "resolved")
    assert DebugGym().scores(tmp_path) == {
        "counter": SOLVED,
        "sum_tree": UNSOLVED,
        "config": FAILED,
        "purr": FAILED,
        "grader": FAILED,
    }


@pytest.mark.parametrize(
    ("success", "state"), [("yes", "resolved"), (True, "unresolved"), (True, "skip-resolved")]
)
def test_contradictory_results_of_debug_gym_are_refused(
    tmp_path: Path, success: object, state: str
) -> None:
    """Neither another type, nor a status that disagrees, nor an unknown one becomes a score."""
    trajectory(tmp_path, "counter", success)
    status(tmp_path, "counter", state)
    with pytest.raises(ResultError):
        DebugGym().scores(tmp_path)


def report(**members: Any) -> dict[str, Any]:
    """A report of SWE-bench's harness over three submitted tasks."""
    ids = ["astropy__astropy-12907", "django__django-11099", "sympy__sympy-13480"]
    return {
        "total_instances": 500,
        "submitted_instances": 3,
        "completed_instances": 2,
        "resolved_instances": 1,
        "unresolved_instances": 1,
        "empty_patch_instances": 0,
        "error_instances": 1,
        "completed_ids": ids[:2],
        "incomplete_ids": ["psf__requests-1142"],
        "empty_patch_ids": [],
        "submitted_ids": ids,
        "resolved_ids": ids[:1],
        "unresolved_ids": ids[1:2],
        "error_ids": ids[2:],
        "schema_version": 2,
        **members,
    }


def test_the_complexity_trap_counts_what_the_agent_began(tmp_path: Path) -> None:
    """Tasks that the agent began and never submitted failed; those of the data set that it never
    saw don't count."""
    for task in (*report()["submitted_ids"], "pytest-dev__pytest-5262"):
        write(tmp_path / "results" / task / f"{task}.config.yaml", {})
    write(tmp_path / "results.leyline.json", report())
    assert ComplexityTrap().scores(tmp_path) == {
        "astropy__astropy-12907": SOLVED,
        "django__django-11099": UNSOLVED,
        "sympy__sympy-13480": FAILED,
        "pytest-dev__pytest-5262": FAILED,
    }


@pytest.mark.parametrize(
    "members",
    [{"schema_version": 3}, {"resolved_ids": ["psf__requests-1142"]}, {"submitted_ids": "all"}],
)
def test_another_report_is_refused(tmp_path: Path, members: dict[str, Any]) -> None:
    """A report of another schema, or one that resolves what wasn't submitted, has no scores."""
    write(tmp_path / "results.leyline.json", report(**members))
    with pytest.raises(ResultError):
        ComplexityTrap().scores(tmp_path)


def loca_config(environment: str, seed: int) -> dict[str, Any]:
    """A configuration as in ``task-configs``."""
    return {
        "name": environment,
        "env_class": f"gem.envs.{environment.lower()}.{environment}",
        "env_params": {"seed": seed, "num_courses": 4},
        "mcp_servers": {"canvas": {"enabled": True, "params": {"login_id": "a@mcp.com"}}},
    }


def loca_job(tmp_path: Path, tasks: str | None) -> Job:
    """A run over a set of two environments with two states each."""
    configs = [
        loca_config(name, seed) for name in ("ABTestingS2LEnv", "ExamS2LEnv") for seed in (1, 2)
    ]
    write(tmp_path / LocaBench.config, {"configurations": configs})
    folder = tmp_path / "run"
    return Job(ENDPOINT, "m", folder, Selection.parse(tasks), checkout=tmp_path)


def prepared(job: Job) -> list[Path]:
    """Write a run's files; the folders among them."""
    folders: list[Path] = []
    for path, text in LocaBench().files(job).items():
        if text is None:
            folders.append(path)
        else:
            write(path, json.loads(text))
    return folders


def loca_eval(job: Job, task: str, **members: Any) -> None:
    """A file ``eval.json``."""
    document = {"status": "success", "accuracy": 1.0, "steps": 9, "feedback": "ok", **members}
    write(job.results / "tasks" / task / "eval.json", document)


def test_loca_bench_numbers_tasks_as_the_benchmark_does(tmp_path: Path) -> None:
    """States count configurations that differ in their seed alone; every environment's first comes
    in front of any second."""
    job = loca_job(tmp_path, None)
    assert LocaBench().expected(job) == (
        "ABTestingS2LEnv/state0",
        "ExamS2LEnv/state0",
        "ABTestingS2LEnv/state1",
        "ExamS2LEnv/state1",
    )
    assert LocaBench().expected(loca_job(tmp_path, "2")) == LocaBench().expected(job)[:2]
    with pytest.raises(PlanError, match="no task"):
        LocaBench().expected(loca_job(tmp_path, "ExamS2LEnv/state2"))


def test_loca_bench_keeps_names_of_selected_tasks(tmp_path: Path) -> None:
    """The benchmark calls the only selected state 0; its score has the name of the whole set."""
    job = loca_job(tmp_path, "ExamS2LEnv/state1,ABTestingS2LEnv/state0")
    prepared(job)
    written = json.loads((job.folder / "loca_config.json").read_text())
    assert [each["env_params"]["seed"] for each in written["configurations"]] == [1, 2]
    loca_eval(job, "ExamS2LEnv/state0")
    loca_eval(job, "ABTestingS2LEnv/state0", status="error", accuracy=0.0)
    assert LocaBench().scores(job.folder) == {
        "ExamS2LEnv/state1": SOLVED,
        "ABTestingS2LEnv/state0": FAILED,
    }


def test_loca_bench_continues_every_task(tmp_path: Path) -> None:
    """A continued run has a folder for each task, because the benchmark looks into no other."""
    job = loca_job(tmp_path, None)
    assert prepared(job) == []
    assert "--resume-dir" not in LocaBench().steps(job)[0].arguments
    write(job.results / "tasks" / "task_mapping.json", {})
    folders = {path.relative_to(job.results / "tasks").as_posix() for path in prepared(job)}
    assert folders == set(LocaBench().expected(job))
    arguments = LocaBench().steps(job)[0].arguments
    assert arguments[arguments.index("--resume-dir") + 1] == str(job.results)


@pytest.mark.parametrize("members", [{"status": "running"}, {"accuracy": 1.5}, {"accuracy": None}])
def test_an_unknown_verdict_of_loca_bench_is_refused(
    tmp_path: Path, members: dict[str, Any]
) -> None:
    """A status or an accuracy that the benchmark doesn't write becomes no score."""
    job = loca_job(tmp_path, None)
    prepared(job)
    loca_eval(job, "ExamS2LEnv/state0", **members)
    with pytest.raises(ResultError):
        LocaBench().scores(job.folder)


def test_loca_bench_is_solved_at_full_accuracy(tmp_path: Path) -> None:
    """Part of an answer isn't a solution."""
    job = loca_job(tmp_path, None)
    prepared(job)
    loca_eval(job, "ExamS2LEnv/state0", accuracy=0.99)
    assert LocaBench().scores(job.folder) == {"ExamS2LEnv/state0": UNSOLVED}
    with pytest.raises(ResultError, match="another form"):
        named({"configurations": [{"env_class": "x"}]})


def test_lines_of_a_command_of_the_users(tmp_path: Path) -> None:
    """The last line of a task counts, and a line of another form is named."""
    path = tmp_path / "results.jsonl"
    path.write_text('{"task": "a", "solved": false}\n{"task": "a", "solved": true}\n')
    assert Custom(("x",)).scores(tmp_path) == {"a": SOLVED}
    path.write_text('{"task": "a", "solved": true}\n{"task": "b", "solved": 1}\n')
    with pytest.raises(ResultError, match="line 2"):
        Custom(("x",)).scores(tmp_path)


@pytest.mark.parametrize("reader", [ComplexityTrap(), LocaBench(), DebugGym(), Custom(("x",))])
def test_no_results_are_an_error(tmp_path: Path, reader: Any) -> None:
    """An empty folder isn't a score of 0."""
    with pytest.raises(ResultError):
        reader.scores(tmp_path)


def test_a_selected_task_without_a_result_failed() -> None:
    """It counts, so that a benchmark that loses tasks doesn't score better."""
    scores = {"a": SOLVED, "x": SOLVED}
    assert with_missing(scores, ("a", "b")) == {"a": SOLVED, "b": FAILED}
    assert with_missing(scores, ()) == scores
