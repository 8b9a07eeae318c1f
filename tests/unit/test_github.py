"""Files that GitHub reads: workflows, forms, updates of dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
GITHUB = REPOSITORY / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.github-issue-forms": [
        path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"
    ],
}


def _validate(schema: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "check-jsonschema"
    return subprocess.run(
        [program, "--builtin-schema", schema, *paths], capture_output=True, text=True, check=False
    )


def _jobs(path: Path) -> dict[str, dict[str, Any]]:
    jobs: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return jobs


def _steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in _jobs(path).values():
        yield from job.get("steps", ())


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_fit_their_schemas(schema: str) -> None:
    """Each file is of the form that GitHub reads."""
    assert SCHEMAS[schema]
    found = _validate(schema, *SCHEMAS[schema])
    assert found.returncode == 0, found.stdout


def test_a_misspelled_key_is_noticed(tmp_path: Path) -> None:
    """A workflow with a key that GitHub doesn't know fails the check."""
    broken = tmp_path / "ci.yml"
    broken.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert _validate("vendor.github-workflows", broken).returncode == 1


def test_ci_runs_the_command_of_the_readme() -> None:
    """The workflow, .ci/run and the README name one command."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^(make \w+) +# .*: what CI runs$", readme, re.MULTILINE)
    (here,) = re.findall(r"^exec (make \w+)", (REPOSITORY / ".ci/run").read_text(), re.MULTILINE)
    ran = [step.get("run") for step in _steps(GITHUB / "workflows" / "ci.yml")]
    assert command == here == ran[-1]


def test_workflows_run_targets_that_exist() -> None:
    """Each target of the Makefile that a workflow runs is one."""
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    ran = {
        target
        for path in WORKFLOWS
        for step in _steps(path)
        for target in re.findall(r"^\s*make ([\w-]+)", step.get("run", ""), re.MULTILINE)
    }
    assert {"test", "nightly", "wheel", "images"} <= ran <= targets


def test_actions_are_pinned_by_commit() -> None:
    """No action can change under its name: each has its commit, and the version beside it."""
    for path in WORKFLOWS:
        for name, version in re.findall(r"uses: ([^@\s]+)@(.+)", path.read_text(encoding="utf-8")):
            assert re.fullmatch(r"[0-9a-f]{40} # v\d+\.\d+\.\d+", version), (path.name, name)


def test_jobs_have_no_more_rights_than_they_need() -> None:
    """Workflows read; a job that may write names what, and a checkout leaves no token."""
    rights = {}
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
        for name, job in _jobs(path).items():
            asked = job.get("permissions", {})
            if writes := {right for right, level in asked.items() if level == "write"}:
                rights[name] = writes
        for step in _steps(path):
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
    assert rights == {
        "files": {"id-token", "attestations"},
        "images": {"packages", "id-token", "attestations"},
        "pypi": {"id-token"},
        "github": {"contents"},
    }


def test_no_expression_reaches_a_shell() -> None:
    """Names of branches and tags come into commands as variables, so they can't be commands."""
    for path in WORKFLOWS:
        assert not [step for step in _steps(path) if "${{" in step.get("run", "")]


def test_nothing_is_published_before_it_is_tested() -> None:
    """A release starts with a tag alone, and each of its jobs follows the tests."""
    release = GITHUB / "workflows" / "release.yml"
    # YAML 1.1 reads the key `on` as true.
    assert set(yaml.safe_load(release.read_text())[True]) == {"push"}
    jobs = _jobs(release)
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    needs = {name: {*_words(job.get("needs", []))} for name, job in jobs.items()}
    assert needs["files"] == needs["images"] == {"test"}
    assert needs["pypi"] == {"files", "images"}
    assert needs["github"] == {"pypi"}


def _words(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
