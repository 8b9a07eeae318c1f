"""The wheel, with what only users need in it, and the files that a release has beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy" / "release"))

import release

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shipped() -> frozenset[str]:
    """Paths in the wheel, as its build would pack them."""
    wheel = pytest.importorskip(
        "hatchling.builders.wheel", reason="`make setup` installs hatchling"
    )
    files = wheel.WheelBuilder(str(REPOSITORY)).recurse_included_files()
    return frozenset(Path(file.distribution_path).as_posix() for file in files)


def test_the_wheel_has_what_commands_and_engines_need(shipped: frozenset[str]) -> None:
    """Code, type markers, templates, weights and the demo's session are packed."""
    for path in (
        "leyline_proxy/cli/main.py",
        "leyline_lab/three_arm/command.py",
        "leyline_lab/demo/session.jsonl.gz",
        "leyline_policies/py.typed",
        "leyline_lab/three_arm/unrotated.py",
        "leyline_lab/evaluation/report.html.jinja",
        "leyline_engine/claims/book.py",
        "leyline_engine/sglang/plugin.py",
    ):
        assert path in shipped, path
    assert any(path.endswith(".safetensors") for path in shipped)


def test_the_laboratory_stays_in_the_checkout(shipped: frozenset[str]) -> None:
    """Neither the claims laboratory nor the demo's recorder is packed, nor any test."""
    for folder in ("bench/leyline_lab/recording", "bench/leyline_lab/claims"):
        assert list((REPOSITORY / folder).glob("*.py")), folder
    assert not [path for path in shipped if "lab" in Path(path).parts]
    assert {Path(path).parts[0] for path in shipped} == {
        "leyline_engine",
        "leyline_policies",
        "leyline_proxy",
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a release of the last commit."""
    out = tmp_path_factory.mktemp("dist")
    release.release(REPOSITORY, out)
    return out


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
    """The list fits CycloneDX's schema, and has what the wheel needs, directly or not, with the
    versions that are tested, and the models in it."""
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
    other = {name for name in versions if pinned.get(name, versions[name]) != versions[name]}
    assert not other
    (own,) = made.glob("*.whl")
    (digest,) = document["metadata"]["component"]["hashes"]
    assert digest == {"alg": "SHA-256", "content": sha256(own.read_bytes()).hexdigest()}


def test_provenance_names_commit_command_and_digests(made: Path) -> None:
    """The statement has the form of in-toto and SLSA, and its digests are those of the files."""
    statement = json.loads((made / release.PROVENANCE).read_text(encoding="utf-8"))
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    for subject in statement["subject"]:
        content = (made / subject["name"]).read_bytes()
        assert subject["digest"] == {"sha256": sha256(content).hexdigest()}
    assert len(statement["subject"]) == 3
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
