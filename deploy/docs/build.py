"""Builds the documentation as a site, in strict mode: a broken link or anchor is an error.

    .venv/bin/python deploy/docs/build.py        # like `make docs`, into out/site

The generator reads one folder. So docs/ and the pages elsewhere in the repository are copied into
one, and links between them are set right.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).parent / "mkdocs.yml"
SHIM = Path(__file__).parent / "iframe-worker.js"

CARD = "engine_patch/leyline_replay/models/trained/plain"
ELSEWHERE = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "LICENSE": "project/LICENSE",
    "README.md": "index.md",
    "SECURITY.md": "project/security-policy.md",
    "bench/README.md": "project/benchmarks.md",
    "deploy/README.md": "project/deployment.md",
    f"{CARD}/README.md": "project/model-card.md",
    f"{CARD}/loss.svg": "project/loss.svg",
}
"""Files outside docs/, and their places on the site. README.md is replaced by the first page, which
docs/ has, too."""

_LINK = re.compile(r"(\]\()([^()\s]+)(\))")
_FENCE = re.compile(r"^ *(```+|~~~+)")


class BrokenLinkError(ValueError):
    """A link leads to a file that isn't a page of the site."""


def stage(folder: Path) -> None:
    """Copy all pages and pictures into ``folder``, with the configuration beside its ``docs``.

    Raises:
        BrokenLinkError: a link leads out of the site.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for source, place in _sources():
        target = folder / "docs" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".md"):
            text = (REPOSITORY / source).read_text(encoding="utf-8")
            target.write_text(_relinked(text, source, place), encoding="utf-8")
        else:
            shutil.copyfile(REPOSITORY / source, target)
    (folder / "docs" / "assets").mkdir()
    shutil.copyfile(SHIM, folder / "docs" / "assets" / SHIM.name)
    shutil.copyfile(CONFIG, folder / CONFIG.name)


def build(folder: Path, site: Path) -> str:
    """Make the site from a staged ``folder``, and move it to ``site``.

    Returns:
        The generator's output.

    Raises:
        RuntimeError: it gave a warning.
    """
    zensical = str(Path(sys.executable).with_name("zensical"))
    done = subprocess.run(  # noqa: S603
        [zensical, "build", "--strict", "--clean", "--config-file", CONFIG.name],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(said)
    shutil.rmtree(site, ignore_errors=True)
    site.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(folder / "site", site)
    return said


def _sources() -> Iterator[tuple[str, str]]:
    """Yield files by their paths in the repository, and the place of each in the site."""
    docs = REPOSITORY / "docs"
    for path in sorted(docs.rglob("*")):
        if path.is_file():
            yield f"docs/{path.relative_to(docs)}", str(path.relative_to(docs))
    for source, place in ELSEWHERE.items():
        if place != "index.md":
            yield source, place


def _relinked(text: str, source: str, place: str) -> str:
    """Return a page with its links corrected for its place in the site."""
    fence, lines = "", []
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if mark is not None and not fence:
            fence = mark[1]
        elif mark is not None and mark[1].startswith(fence):
            fence = ""
        inside = fence or mark is not None
        lines.append(line if inside else _LINK.sub(lambda it: _link(it, source, place), line))
    return "".join(lines)


def _link(link: re.Match[str], source: str, place: str) -> str:
    path, sign, anchor = link[2].partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return link[0]
    goal = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (REPOSITORY / goal).exists():
        raise BrokenLinkError(f"{source} links to {path}, which doesn't exist")
    there = ELSEWHERE.get(goal) or goal.removeprefix("docs/")
    if goal not in ELSEWHERE and not goal.startswith("docs/"):
        raise BrokenLinkError(f"{source} links to {path}, which isn't on the site")
    goal = posixpath.relpath(there, posixpath.dirname(place) or ".")
    return f"{link[1]}{goal}{sign}{anchor}{link[3]}"


def main() -> int:
    """Build into ``--site``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--site", type=Path, default=REPOSITORY / "out" / "site")
    site = parser.parse_args().site
    folder = REPOSITORY / "out" / "docs"
    try:
        stage(folder)
        build(folder, site)
    except (BrokenLinkError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{site / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
