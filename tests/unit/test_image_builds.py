"""The command that builds images, with a stand-in for docker, which doesn't run here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCKER = """#!/bin/sh
[ "$2" != version ] || exit 0
printf '%s\\n' "$@" >>"$SAID"
while [ $# -gt 0 ]; do
    [ "$1" != --metadata-file ] || printf '{\\n  "containerimage.digest": "sha256:12ab"\\n}' >"$2"
    [ "$1" != --file ] || test -f "$2" || exit 1
    shift
done
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which no image has been built, with the stand-in beside it."""
    folder = tmp_path_factory.mktemp("images")
    clone = folder / "clone"
    subprocess.run(["git", "clone", "-q", "--shared", REPOSITORY, clone], check=True)
    for name in ("Makefile", "deploy/images.sh"):
        shutil.copy(REPOSITORY / name, clone / name)
    docker = folder / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    return clone


def _make(clone: Path, said: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"{clone.parent / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["make", "images", *words],
        cwd=clone,
        env={**os.environ, "PATH": path, "SAID": str(said)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_images_have_their_components_and_provenance(clone: Path, tmp_path: Path) -> None:
    """An image that is pushed has SBOM and full provenance, and its digest is noted for the
    workflow."""
    words = ("IMAGES=proxy", "PUSH=1", "REGISTRY=ghcr.io/owner/")
    done = _make(clone, tmp_path / "said", *words)
    assert done.returncode == 0, done.stderr
    said = (tmp_path / "said").read_text().splitlines()
    assert {"--sbom=true", "--provenance=mode=max"} <= set(said)
    assert "type=image,push=true,rewrite-timestamp=true" in said
    noted = (clone / "out" / "images" / "proxy.txt").read_text()
    assert noted == "name=ghcr.io/owner/leyline-proxy\ndigest=sha256:12ab\n"


def test_images_are_pushed_nowhere_by_default(clone: Path, tmp_path: Path) -> None:
    """Without a word, all three are built into files; a push without a registry is refused."""
    done = _make(clone, tmp_path / "said")
    assert done.returncode == 0, done.stderr
    said = (tmp_path / "said").read_text()
    assert said.count("--output") == 3
    assert "push=true" not in said
    refused = _make(clone, tmp_path / "said", "PUSH=1")
    assert refused.returncode != 0
    assert "PUSH needs a registry" in refused.stderr
