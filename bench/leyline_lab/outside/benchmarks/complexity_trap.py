"""The Complexity Trap: SWE-agent on SWE-bench Verified, its context managed by the proxy.

Commands follow ``README.md`` and ``scripts/run_batch_with_eval_template_sglang.sh`` of the
repository; the agent itself runs with the configuration that keeps every observation, because the
proxy's policy masks them. The report is that of ``swebench`` 4.1.0 (``harness/reporting.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...errors import ResultError
from ..tasks import Scores, TaskScore
from .base import RESULTS, Job, Source, Step, decoded

_RUN_ID = "leyline"
_REPORT = f"{RESULTS}.{_RUN_ID}.json"
_DATASET = "princeton-nlp/SWE-bench_Verified"
_CALLS = 250
"""Calls per task in the paper's runs."""
_SCHEMA = 2


class _Report(msgspec.Struct):
    schema_version: int
    submitted_ids: list[str]
    resolved_ids: list[str]
    error_ids: list[str]


class ComplexityTrap:
    """SWE-agent on SWE-bench Verified with observation masking (arXiv 2508.21433)."""

    name = "complexity-trap"
    source = Source(
        "https://github.com/JetBrains-Research/the-complexity-trap",
        "bf15b5fb7d279679035a007ac9a81084d6b9a89a",
        "sweagent/run/run_batch.py",
        "sweagent",
    )
    policy = "last_n_observations:n=10"
    needs_docker = True
    config = "config/default_no_demo_raw.yaml"

    def install(self, checkout: Path) -> tuple[str, ...]:
        """Return the shell lines that make a checkout ready."""
        return (
            f"uv venv {checkout}/.venv --python 3.12 --seed",
            f"uv pip install --python {checkout}/.venv/bin/python -e {checkout} swebench==4.1.0",
        )

    def expected(self, job: Job) -> tuple[str, ...]:
        """Return the ids that the user named; the data set, which has the others, is remote."""
        return job.selection.ids

    def files(self, job: Job) -> Mapping[Path, str | None]:
        """Return nothing to write."""
        return {}

    def steps(self, job: Job) -> tuple[Step, ...]:
        """Return the agent's command and the scoring, which both skip tasks that are done."""
        selection = job.selection
        chosen: tuple[str, ...] = ()
        if selection.ids:
            chosen = ("--instances.filter", f"^({'|'.join(selection.ids)})$")
        elif selection.count is not None:
            chosen = ("--instances.slice", f":{selection.count}")
        agent = (
            *(job.program("sweagent"), "run-batch", "--config", job.config or self.config),
            *("--agent.model.name", f"openai/{job.model}"),
            *("--agent.model.api_base", job.endpoint.base_url),
            *("--agent.model.temperature", "0.0"),
            *("--agent.model.per_instance_call_limit", str(_CALLS)),
            *("--agent.model.per_instance_cost_limit", "0", "--agent.model.total_cost_limit", "0"),
            *("--instances.type", "swe_bench", "--instances.subset", "verified"),
            *("--instances.split", "test", *chosen),
            *("--num_workers", str(job.workers), "--output_dir", str(job.results)),
            *job.extra,
        )
        scoring = (
            *(job.program("python"), "-P", "-m", "swebench.harness.run_evaluation"),
            *("--dataset_name", _DATASET, "--split", "test"),
            *("--predictions_path", str(job.results / "preds.json")),
            *("--max_workers", str(job.workers), "--timeout", "900", "--run_id", _RUN_ID),
        )
        return (
            Step("benchmark", agent, job.checkout, job.endpoint.variables()),
            # The report is written into the working directory.
            Step("scoring", scoring, job.folder),
        )

    def scores(self, folder: Path) -> Scores:
        """Return the report's verdicts on the tasks that the agent began."""
        begun = {path.parent.name for path in (folder / RESULTS).glob("*/*.config.yaml")}
        return scores_of(decoded(folder / _REPORT, _Report), begun)


def scores_of(report: _Report, begun: set[str]) -> dict[str, TaskScore]:
    """Return the scores of the tasks that an agent began or submitted.

    Raises:
        ResultError: a report of another schema, or one that resolves what was never submitted.
    """
    if report.schema_version != _SCHEMA:
        raise ResultError(f"the report has schema {report.schema_version}, not {_SCHEMA}")
    submitted, resolved = set(report.submitted_ids), set(report.resolved_ids)
    if not resolved <= submitted:
        raise ResultError("the report resolves tasks that were not submitted")
    failed = set(report.error_ids)
    tasks = sorted(begun | submitted)
    if not tasks:
        raise ResultError("the agent began no task")
    return {
        task: TaskScore(task in resolved, task not in submitted or task in failed) for task in tasks
    }
