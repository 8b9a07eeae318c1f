"""Counts the house: lines and files of each distribution, loose modules, pages and words.

Run it as ``python tests/support/house.py [CHECKOUT]``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "serving": (
        "proxy/leyline_proxy",
        "policies/leyline_policies",
        "engine_patch/leyline_engine",
    ),
    "replay engine": ("engine_patch/leyline_replay",),
    "laboratory": ("bench/leyline_lab",),
}
"""Folders of each distribution's packages."""
OTHER_CODE = ("grafana", "deploy")
_NOT_PROSE = ("docs/api",)


@dataclass(frozen=True, slots=True)
class Count:
    """Files, and what was counted in them."""

    files: int
    size: int


def python_files(root: Path, *folders: str) -> Iterator[Path]:
    """Yield the Python files below folders of a checkout, in order."""
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


def product_files(root: Path = CHECKOUT) -> Iterator[tuple[str, str]]:
    """Yield path and text of each Python file of the product."""
    folders = (*(each for group in PACKAGES.values() for each in group), *OTHER_CODE)
    for path in python_files(root, *folders):
        yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def distributions(root: Path = CHECKOUT) -> dict[str, Count]:
    """Return files and lines of each distribution."""
    found = {}
    for name, folders in PACKAGES.items():
        lines = [len(path.read_text("utf-8").splitlines()) for path in python_files(root, *folders)]
        found[name] = Count(len(lines), sum(lines))
    return found


def loose_modules(root: Path = CHECKOUT) -> list[str]:
    """Return the names of the modules at the engine's root."""
    folder = root / "engine_patch" / "leyline_engine"
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def pages(root: Path = CHECKOUT) -> Count:
    """Return the documentation's pages and words, without the reference made from the code."""
    paths = [*root.glob("*.md"), *root.glob("docs/**/*.md"), root / "bench" / "README.md"]
    written = [
        path for path in paths if not path.relative_to(root).as_posix().startswith(_NOT_PROSE)
    ]
    return Count(len(written), sum(len(path.read_text("utf-8").split()) for path in written))


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield name and lines of each function of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def main(root: Path) -> None:
    """Print the counts."""
    for name, count in distributions(root).items():
        print(f"{name:14} {count.size:7,} lines in {count.files} files")
    print(f"{'loose modules':14} {', '.join(loose_modules(root))}")
    written = pages(root)
    print(f"{'documentation':14} {written.size:7,} words in {written.files} pages")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKOUT)
