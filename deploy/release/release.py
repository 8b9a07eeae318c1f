"""Builds a release's files from the last commit, bit by bit the same each time: ``make wheel``.

Wheel and source distribution of each of the three distributions, a CycloneDX list of components, an
in-toto statement of their provenance (SLSA 1), and SHA256SUMS over all of them. Uncommitted changes
are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

from sbom import components

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = "make wheel"
SBOM, PROVENANCE, SUMS = "sbom.cdx.json", "provenance.intoto.json", "SHA256SUMS"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
_BUILD_TYPE = "urn:leyline:make-wheel:1"
_LOCAL_BUILDER = "urn:leyline:builder:local"
_BACKEND = "hatchling"
DISTRIBUTIONS = {"leyline_kv": ".", "leyline_replay": "engine_patch", "leyline_lab": "bench"}
"""Folders of the distributions, by the names that their files begin with; the main one first."""
_FORMS = {"wheel": "-*.whl", "sdist": "-*.tar.gz"}


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that a release is built from."""

    digest: str
    seconds: int
    """Its time since 1970; archives give it to every file."""


def last_commit(repository: Path) -> Commit:
    """Return the last commit of a checkout."""
    digest, seconds = _git(repository, "show", "-s", "--format=%H %ct", "HEAD").split()
    return Commit(digest.decode(), int(seconds))


def release(repository: Path, out: Path) -> list[Path]:
    """Build all files of a release into ``out``; return them, SHA256SUMS last.

    Raises:
        subprocess.CalledProcessError: ``repository`` is no checkout, or the back end failed.
        importlib.metadata.PackageNotFoundError: a package to list isn't installed.
    """
    commit = last_commit(repository)
    out.mkdir(parents=True, exist_ok=True)
    with _tree(repository, commit) as tree:
        wheels = [_built(tree, commit, out, name, "wheel") for name in DISTRIBUTIONS]
        sdists = [_built(tree, commit, out, name, "sdist") for name in DISTRIBUTIONS]
    listed = out / SBOM
    listed.write_text(
        components(wheels, datetime.fromtimestamp(commit.seconds, UTC)), encoding="utf-8"
    )
    stated = out / PROVENANCE
    subjects = [*wheels, *sdists, listed]
    stated.write_text(
        json.dumps(provenance(commit, subjects, os.environ), indent=2, sort_keys=True) + "\n",
        encoding="utf-8",
    )
    files = sorted([*subjects, stated])
    sums = out / SUMS
    sums.write_text("".join(f"{_sha256(path)}  {path.name}\n" for path in files), encoding="utf-8")
    return [*files, sums]


def provenance(
    commit: Commit, subjects: Sequence[Path], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the in-toto statement: which commit, command and tools made which files.

    It isn't signed; the workflow of a release signs one of its own beside it.
    """
    source: dict[str, Any] = {"name": "source", "digest": {"gitCommit": commit.digest}}
    builder = _LOCAL_BUILDER
    if repository := environment.get("GITHUB_REPOSITORY"):
        server = environment["GITHUB_SERVER_URL"]
        source["uri"] = f"git+{server}/{repository}@{environment['GITHUB_REF']}"
        builder = f"{server}/{environment['GITHUB_WORKFLOW_REF']}"
    backend = version(_BACKEND)
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": path.name, "digest": {"sha256": _sha256(path)}} for path in sorted(subjects)
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": {"command": COMMAND, "source": source},
                "internalParameters": {
                    "SOURCE_DATE_EPOCH": str(commit.seconds),
                    "python": platform.python_version(),
                    "zlib": zlib.ZLIB_RUNTIME_VERSION,
                },
                "resolvedDependencies": [
                    source,
                    {"name": _BACKEND, "uri": f"pkg:pypi/{_BACKEND}@{backend}"},
                ],
            },
            "runDetails": {"builder": {"id": builder}},
        },
    }


@contextmanager
def _tree(repository: Path, commit: Commit) -> Iterator[Path]:
    """Give a folder with the commit's files, and nothing else."""
    packed = _git(repository, "archive", "--format=tar", commit.digest)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(packed)) as opened:
            opened.extractall(folder, filter="data")
        yield Path(folder)


def _built(tree: Path, commit: Commit, out: Path, name: str, kind: str) -> Path:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(commit.seconds)}
    words = [
        sys.executable,
        "-P",
        "-m",
        _BACKEND,
        "build",
        "--target",
        kind,
        "--directory",
        str(out),
    ]
    folder = tree / DISTRIBUTIONS[name]
    subprocess.run(words, cwd=folder, env=environment, check=True)  # noqa: S603
    (made,) = out.glob(name + _FORMS[kind])
    return made


def _git(repository: Path, *words: str) -> bytes:
    command = ["git", "-C", str(repository), *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout  # noqa: S603


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Build into the folder that is given, or ``dist``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=REPOSITORY / "dist")
    out: Path = parser.parse_args().out.resolve()
    changed = _git(REPOSITORY, "status", "--porcelain", "--untracked-files=no")
    if changed:
        print("── uncommitted changes are left out", file=sys.stderr)
    if found := sorted(out.glob("*")):
        parser.exit(1, f"error: {out} holds {found[0].name}\n       Empty it: make clean\n")
    for path in release(REPOSITORY, out):
        print(path)


if __name__ == "__main__":
    main()
