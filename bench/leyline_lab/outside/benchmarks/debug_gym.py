"""debug-gym's mini_nightmare, its tool results truncated by the proxy.

Commands follow ``scripts/run.py`` and ``debug_gym/agents/utils.py`` of release 1.3.0, the model's
entry ``debug_gym/llms/base.py``, result files ``analysis/gather_results.py`` and
``debug_gym/logger.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...errors import PlanError, ResultError
from ..tasks import Scores, TaskScore
from .base import RESULTS, Job, Source, Step, decoded

_ENTRY = "leyline"
"""Name of the model's entry in the written configuration."""
_CONFIG = "llm.yaml"
_TEMPERATURE = 0.5
"""As in the benchmark's own template."""
_WINDOW = 10_000
"""Thousands of tokens that the client assumes: it must not trim what the policy keeps."""
_TASKS = (
    "config",
    "counter",
    "grader",
    "pandas_dataframe",
    "patcher",
    "purr",
    "scientific_calculator",
    "shopping_cart",
    "sum_tree",
    "tomorrow_date",
)


class _Trajectory(msgspec.Struct):
    problem: str
    success: bool


class _Status(msgspec.Struct):
    problem_id: str
    status: str


class DebugGym:
    """debug-gym mini_nightmare under the policy of the Leyline paper (arXiv 2503.21557)."""

    name = "debug-gym"
    source = Source(
        "https://github.com/microsoft/debug-gym",
        "c1a9278c5876fa7e00c7d2e6b956891ec482ac80",
        "scripts/run.py",
        "python",
    )
    policy = "truncate_older_than:n=2,max_chars=200"
    needs_docker = True
    config = "configs/mini_nightmare.yaml"

    def install(self, checkout: Path) -> tuple[str, ...]:
        """Return the shell lines that make a checkout ready."""
        return (
            f"uv venv {checkout}/.venv --python 3.12",
            f"uv pip install --python {checkout}/.venv/bin/python -e {checkout}",
        )

    def expected(self, job: Job) -> tuple[str, ...]:
        """Return the selected tasks of the ten; with another configuration, those with ids."""
        if job.config is None:
            return job.selection.of(_TASKS, self.name)
        if job.selection.count is not None:
            raise PlanError("debug-gym takes ids for --tasks with a --config of your own")
        return job.selection.ids

    def files(self, job: Job) -> Mapping[Path, str | None]:
        """Return the model's entry; JSON is YAML."""
        entry = {
            "model": job.model,
            "tokenizer": job.tokenizer or job.model,
            "endpoint": job.endpoint.base_url,
            "api_key": job.endpoint.api_key,
            "tags": ["vllm"],
            "context_limit": _WINDOW,
            "generate_kwargs": {"temperature": _TEMPERATURE},
        }
        return {job.folder / _CONFIG: json.dumps({_ENTRY: entry}, indent=2)}

    def steps(self, job: Job) -> tuple[Step, ...]:
        """Return the benchmark's command, which skips tasks that are done.

        Raises:
            PlanError: the output folder can't be written into its parameters.
        """
        if set("=:#'\"") & set(str(job.folder)):
            raise PlanError(f"debug-gym takes no folder with =, :, # or quotes: {job.folder}")
        problems = self.expected(job)
        arguments = (
            *(job.program("python"), "scripts/run.py", "--config", job.config or self.config),
            *("--no-live-display", "--num-workers", str(job.workers)),
            *("--params", f"output_path={job.folder}", f"uuid={RESULTS}", f"llm.name={_ENTRY}"),
            *((f"dataset.problems=[{','.join(problems)}]",) if problems else ()),
            *job.extra,
        )
        variables = {
            **job.endpoint.variables(),
            "LLM_CONFIG_FILE_PATH": str(job.folder / _CONFIG),
        }
        return (Step("benchmark", arguments, job.checkout, variables),)

    def scores(self, folder: Path) -> Scores:
        """Return the verdicts of all trajectories; a task without one ended with an error."""
        root = folder / RESULTS
        trajectories = [
            decoded(path, _Trajectory) for path in sorted(root.glob("*/trajectory.json"))
        ]
        states = [decoded(path, _Status) for path in sorted(root.glob("*/*_status.json"))]
        if not trajectories and not states:
            raise ResultError(f"{root} holds no trajectory.json")
        return scores_of(trajectories, states)


def scores_of(trajectories: list[_Trajectory], states: list[_Status]) -> dict[str, TaskScore]:
    """Return the scores of tasks.

    Raises:
        ResultError: a task's status and its trajectory disagree, or the status isn't known.
    """
    scores = {each.problem: TaskScore(each.success) for each in trajectories}
    for state in states:
        task = state.problem_id
        match state.status:
            case "resolved" | "unresolved" if task in scores:
                if scores[task].solved != (state.status == "resolved"):
                    raise ResultError(f"status and trajectory of {task} disagree")
            case "error" | "running" | "pending" | "resolved" | "unresolved":
                # A trajectory of an attempt that ended with an error isn't a result.
                scores[task] = TaskScore(solved=False, failed=True)
            case _:
                raise ResultError(f"{task} has the status {state.status!r} of no known format")
    return scores
