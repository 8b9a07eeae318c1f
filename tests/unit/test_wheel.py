"""The wheels of the three distributions, and the files that a release has beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy" / "release"))

import release

REPOSITORY = Path(__file__).parents[2]


MOST_MB = {"leyline_kv": 1.65, "leyline_replay": 9.0, "leyline_lab": 1.0}
CONTENT = {
    "leyline_kv": {
        "leyline_engine/claims/book.py",
        "leyline_engine/sglang/plugin.py",
        "leyline_engine/vllm/plugin.py",
        "leyline_policies/builtin/keys/LICENSE.gitleaks",
        "leyline_policies/builtin/keys/rules.toml",
        "leyline_policies/py.typed",
        "leyline_proxy/cli/main.py",
        "leyline_proxy/live/static/index.html",
    },
    "leyline_replay": {
        "leyline_replay/factory.py",
        "leyline_replay/models/trained/plain/chat_template.jinja",
        "leyline_replay/models/trained/plain/model.safetensors",
        "leyline_replay/models/trained/plain/tokenizer.json",
        "leyline_replay/py.typed",
    },
    "leyline_lab": {
        "leyline_lab/commands/demo.py",
        "leyline_lab/demo/session.jsonl.gz",
        "leyline_lab/evaluation/report.html.jinja",
        "leyline_lab/py.typed",
        "leyline_lab/recording/repo.txt",
    },
}
"""Files of each distribution that code, typing or a licence needs."""
PACKAGES = {
    "leyline_kv": {"leyline_engine", "leyline_policies", "leyline_proxy"},
    "leyline_replay": {"leyline_replay"},
    "leyline_lab": {"leyline_lab"},
}


def _wheel(made: Path, name: str) -> Path:
    (wheel,) = made.glob(f"{name}-*.whl")
    return wheel


def _files(wheel: Path) -> set[str]:
    with ZipFile(wheel) as opened:
        return set(opened.namelist())


def _project(name: str) -> dict[str, Any]:
    path = REPOSITORY / release.DISTRIBUTIONS[name] / "pyproject.toml"
    project: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return project


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a release of the last commit."""
    out = tmp_path_factory.mktemp("dist")
    release.release(REPOSITORY, out)
    return out


@pytest.mark.parametrize("name", release.DISTRIBUTIONS)
def test_a_wheel_has_what_is_its_own(made: Path, name: str) -> None:
    """Its packages with the files that they read, its licence, and nothing of the other two: the
    proxy's wheel has neither replay engine nor laboratory nor weights, and no wheel has tests."""
    wheel = _wheel(made, name)
    files = _files(wheel)
    assert files >= CONTENT[name]
    info = f"{name}-{_project(name)['version']}.dist-info"
    assert {Path(path).parts[0] for path in files} == {*PACKAGES[name], info}
    assert f"{info}/licenses/LICENSE" in files
    weights = [path for path in files if path.endswith(".safetensors")]
    assert len(weights) == (3 if name == "leyline_replay" else 0)
    assert not [path for path in files if Path(path).name.startswith("test_")]


@pytest.mark.parametrize("name", release.DISTRIBUTIONS)
def test_a_wheel_stays_small(made: Path, name: str) -> None:
    """The proxy's is downloaded by every engine, too."""
    assert _wheel(made, name).stat().st_size <= MOST_MB[name] * 1e6


def test_the_three_have_one_version_and_licence() -> None:
    """They are released together, and each requires the others in the version of its own."""
    version = _project("leyline_kv")["version"]
    licence = (REPOSITORY / "LICENSE").read_bytes()
    for name, folder in release.DISTRIBUTIONS.items():
        project = _project(name)
        assert project["version"] == version
        assert (REPOSITORY / folder / "LICENSE").read_bytes() == licence
        wanted = [*project["dependencies"]]
        for extra, lines in project.get("optional-dependencies", {}).items():
            wanted += lines if extra != "dev" else ()
        ours = [each for each in map(Requirement, wanted) if each.name.startswith("leyline-")]
        assert ours
        assert {str(each.specifier) for each in ours} == {f"=={version}"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", release.DISTRIBUTIONS)
def test_a_source_distribution_builds_the_same_wheel(made: Path, tmp_path: Path, name: str) -> None:
    """Unpacked elsewhere, without the repository around it, it has all that its wheel needs."""
    (sdist,) = made.glob(f"{name}-*.tar.gz")
    with tarfile.open(sdist) as opened:
        opened.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    command = [sys.executable, "-P", "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    again, wheel = _wheel(tmp_path, name), _wheel(made, name)
    assert _files(again) == _files(wheel)
    with ZipFile(again) as one, ZipFile(wheel) as other:
        assert all(one.read(path) == other.read(path) for path in _files(wheel))


def test_sums_cover_every_file(made: Path) -> None:
    """`sha256sum --check` accepts a release, and refuses it after any change of one file."""
    check = ["sha256sum", "--check", "--strict", release.SUMS]
    assert subprocess.run(check, cwd=made, capture_output=True, check=False).returncode == 0
    lines = (made / release.SUMS).read_text().splitlines()
    assert {line.split("  ")[1] for line in lines} == {
        path.name for path in made.iterdir() if path.name != release.SUMS
    }
    listed = made / release.SBOM
    content = listed.read_bytes()
    listed.write_bytes(content + b" ")
    assert subprocess.run(check, cwd=made, capture_output=True, check=False).returncode == 1
    listed.write_bytes(content)


def test_components_are_valid_and_complete(made: Path) -> None:
    """The list fits CycloneDX's schema, and has what the wheels need, directly or not, with the
    versions that are tested, the models in them, and the wheels' digests."""
    text = (made / release.SBOM).read_text(encoding="utf-8")
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"library"', '"librarian"')) is not None
    document = json.loads(text)
    versions = {item["name"]: item["version"] for item in document["components"]}
    lines = (REPOSITORY / "deploy" / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    pinned = {canonicalize_name(name): version for name, version in pairs}
    assert {"httpx", "torch", "starlette", "uvloop", "leyline-recall-plain"} <= set(versions)
    assert {"leyline-replay", "leyline-lab", "matplotlib"} <= set(versions)
    other = {name for name in versions if pinned.get(name, versions[name]) != versions[name]}
    assert not other
    for component in (document["metadata"]["component"], *document["components"]):
        name = component["name"].replace("-", "_")
        if name in release.DISTRIBUTIONS:
            content = sha256(_wheel(made, name).read_bytes()).hexdigest()
            assert component["hashes"] == [{"alg": "SHA-256", "content": content}]


def test_provenance_names_commit_command_and_digests(made: Path) -> None:
    """The statement has the form of in-toto and SLSA, and its digests are those of the files."""
    statement = json.loads((made / release.PROVENANCE).read_text(encoding="utf-8"))
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    for subject in statement["subject"]:
        content = (made / subject["name"]).read_bytes()
        assert subject["digest"] == {"sha256": sha256(content).hexdigest()}
    assert len(statement["subject"]) == 2 * len(release.DISTRIBUTIONS) + 1
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    build = statement["predicate"]["buildDefinition"]
    assert build["externalParameters"]["command"] == "make wheel"
    assert build["resolvedDependencies"][0]["digest"]["gitCommit"] == head.stdout.strip()


@pytest.mark.nightly
def test_two_builds_are_equal_bit_by_bit(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither clock, time zone, umask nor folder changes a bit of any file."""
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    before = os.umask(0o077)
    try:
        release.release(REPOSITORY, tmp_path / "other")
    finally:
        os.umask(before)
    names = {path.name for path in made.iterdir()}
    assert names == {path.name for path in (tmp_path / "other").iterdir()}
    for name in names:
        assert (made / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name
