"""The command that pins the images of others, with a stand-in for docker."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FILES = ("Dockerfile", "Dockerfile.proxy", "Dockerfile.sglang", "compose.yaml")
DOCKER = r"""#!/bin/sh
[ "$2" != version ] || exit 0
[ "$1 $2 $3" = "buildx imagetools inspect" ] || exit 1
printf '%s\n' "$4" >>"$SAID"
case $4 in
    *:gone) exit 1 ;;
    *:odd) echo '<no value>' ;;
    *) printf 'sha256:%s\n' "$(printf %s "$4" | sha256sum | cut -d ' ' -f 1)" ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the files that name images, with the stand-in beside it."""
    deploy = tmp_path / "deploy"
    deploy.mkdir()
    for name in (*FILES, "digests.sh", "lib.sh"):
        shutil.copy(REPOSITORY / "deploy" / name, deploy / name)
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    return tmp_path


def _run(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SAID": str(folder / "said"), **variables}
    return subprocess.run(
        [folder / "deploy" / "digests.sh"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _texts(folder: Path) -> dict[str, str]:
    return {name: (folder / "deploy" / name).read_text() for name in FILES}


def test_each_image_of_others_gets_the_digest_of_its_tag(folder: Path) -> None:
    """Nothing but digests changes, images made here have none, and a second run changes nothing."""
    before = _texts(folder)
    done = _run(folder)
    assert done.returncode == 0, done.stderr
    asked = (folder / "said").read_text().splitlines()
    assert len(asked) == len(set(asked)) == 5
    assert not [name for name in asked if "leyline" in name or "@" in name]
    after = _texts(folder)
    for name in FILES:
        old, new = before[name].splitlines(), after[name].splitlines()
        assert len(old) == len(new)
        for line, now in zip(old, new, strict=True):
            assert line.partition("@sha256:")[0] in now
    assert after["Dockerfile.sglang"].count("@sha256:") == 2
    assert after["compose.yaml"].count("@sha256:") == 3
    assert " AS build\n" in after["Dockerfile"]
    assert _run(folder, CHECK="1").returncode == 0
    assert _texts(folder) == after


def test_a_check_changes_nothing_and_fails(folder: Path) -> None:
    """It names the images whose digest is missing or old."""
    before = _texts(folder)
    done = _run(folder, CHECK="1")
    assert done.returncode == 1
    assert "lmsysorg/sglang" in done.stderr and "make digests" in done.stderr
    assert _texts(folder) == before


@pytest.mark.parametrize(("tag", "told"), [("gone", "has no redis:gone"), ("odd", "no digest of")])
def test_a_tag_without_a_digest_ends_it(folder: Path, tag: str, told: str) -> None:
    """An answer that is no digest is never written."""
    compose = folder / "deploy" / "compose.yaml"
    lines = [
        f"    image: redis:{tag}" if "image: redis:" in line else line
        for line in compose.read_text().splitlines()
    ]
    compose.write_text("\n".join(lines))
    done = _run(folder)
    assert done.returncode == 1
    assert told in done.stderr
    assert f"redis:{tag}\n" in compose.read_text()
