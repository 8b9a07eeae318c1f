"""LOCA-bench: long-context agents on generated environments, their context managed by the proxy.

Commands follow ``loca/cli/commands/run.py``, names of tasks and result files
``inference/run_react.py``. The benchmark's own context management stays off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...errors import MissingError, ResultError
from ..tasks import Scores, TaskScore
from .base import RESULTS, Job, Source, Step, decoded

_CONFIG = "loca_config.json"
_NO_TRIMMING = "10000000"
"""Window in tokens that the client assumes: it must not trim what the proxy's policy keeps."""

_KEY = "leyline_task"
"""Member of a written configuration: the task's name in the whole set."""


class _Eval(msgspec.Struct):
    status: str
    accuracy: float


class LocaBench:
    """LOCA-bench with its longest tool results cleared (arXiv 2602.07962)."""

    name = "loca-bench"
    source = Source(
        "https://github.com/hkust-nlp/LOCA-bench",
        "8cd474d5efdf36c8c95555165ba0965e0496e48f",
        "loca/cli/commands/run.py",
        "loca",
    )
    policy = "clear_tool_uses:trigger_tokens=100000,keep=3"
    needs_docker = False
    config = "task-configs/final_128k_set_config.json"

    def install(self, checkout: Path) -> tuple[str, ...]:
        """Return the shell lines that make a checkout ready."""
        return (
            f"uv venv {checkout}/.venv --python 3.10",
            f"(cd {checkout} && . .venv/bin/activate && bash install.sh)",
        )

    def expected(self, job: Job) -> tuple[str, ...]:
        """Return the tasks of the configuration file, or those that were selected."""
        return job.selection.of(tuple(named(self._document(job))), self.name)

    def files(self, job: Job) -> Mapping[Path, str | None]:
        """Return a configuration with the selected tasks.

        When a run is continued, the benchmark looks only into folders that exist, so every task
        gets one.
        """
        document = self._document(job)
        chosen = self.expected(job)
        tasks = named(document)
        kept = [{**tasks[name], _KEY: name} for name in tasks if name in set(chosen)]
        content = json.dumps({**document, "configurations": kept}, indent=2)
        files: dict[Path, str | None] = {job.folder / _CONFIG: content}
        if _begun(job):
            folder = job.results / "tasks"
            files |= {folder / name: None for name in named({"configurations": kept})}
        return files

    def steps(self, job: Job) -> tuple[Step, ...]:
        """Return the benchmark's command."""
        again = ("--resume-dir", str(job.results)) if _begun(job) else ()
        arguments = (
            *(job.program("loca"), "run", "--config-file", str(job.folder / _CONFIG)),
            *("--strategy", "react", "--model", job.model),
            *("--max-context-size", _NO_TRIMMING, "--max-workers", str(job.workers)),
            *("--output-dir", str(job.results), *again, *job.extra),
        )
        variables = {
            **job.endpoint.variables(),
            "LOCA_OPENAI_BASE_URL": job.endpoint.base_url,
            "LOCA_OPENAI_API_KEY": job.endpoint.api_key,
        }
        return (Step("benchmark", arguments, job.checkout, variables),)

    def scores(self, folder: Path) -> Scores:
        """Return the verdicts of all ``eval.json``, by the names in the configuration that ran."""
        tasks = folder / RESULTS / "tasks"
        found = {
            f"{path.parent.parent.name}/{path.parent.name}": decoded(path, _Eval)
            for path in sorted(tasks.glob("*/state*/eval.json"))
        }
        if not found:
            raise ResultError(f"{tasks} holds no eval.json")
        scores = {name: score_of(name, result) for name, result in found.items()}
        config = folder / _CONFIG
        if not config.is_file():  # another program wrote in the format
            return scores
        ran = named(decoded(config, dict[str, Any]))
        return {str(ran[name].get(_KEY, name)): scores[name] for name in ran if name in scores}

    def _document(self, job: Job) -> dict[str, Any]:
        path = job.checkout / (job.config or self.config)
        if not path.is_file():
            raise MissingError(f"there is no configuration {path}; name one: --config FILE")
        return decoded(path, dict[str, Any])


def _begun(job: Job) -> bool:
    return (job.results / "tasks" / "task_mapping.json").is_file()


def named(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the configurations by ``NAME/stateI``, the first of every name in front of the second.

    The benchmark numbers the configurations that differ in their seed alone. Names and numbers are
    computed here as there.

    Raises:
        ResultError: a document of another form.
    """
    states: dict[str, int] = {}
    groups: dict[str, str] = {}
    found: list[tuple[int, str, dict[str, Any]]] = []
    try:
        for config in document["configurations"]:
            kind = config["env_class"]
            same = {name: value for name, value in config["env_params"].items() if name != "seed"}
            group = json.dumps([kind, same, config["mcp_servers"]], sort_keys=True)
            name = groups.setdefault(group, config.get("name") or kind.rsplit(".", 1)[-1])
            state = states.get(group, 0)
            states[group] = state + 1
            found.append((state, f"{name}/state{state}", config))
    except (KeyError, TypeError, AttributeError) as error:
        raise ResultError("the configuration of LOCA-bench has another form") from error
    if len({name for _, name, _ in found}) != len(found):
        raise ResultError("two configurations of LOCA-bench have the same name")
    return {name: config for _, name, config in sorted(found, key=lambda each: each[0])}


def score_of(name: str, result: _Eval) -> TaskScore:
    """Return the score of a task: solved at full accuracy.

    Raises:
        ResultError: a status or an accuracy that the benchmark doesn't write.
    """
    if result.status not in ("success", "error") or not 0 <= result.accuracy <= 1:
        raise ResultError(f"{name} has the status {result.status!r} of no known format")
    failed = result.status == "error"
    return TaskScore(not failed and result.accuracy == 1, failed)
