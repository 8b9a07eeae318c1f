"""The documentation, with the help of commands, and docstrings are in plain English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "bench/**/*.md", "grafana/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)

SOURCES = ("proxy", "engine_patch", "policies", "grafana", "deploy", "bench", "tests")

BANNED = {
    r"anew": "again",
    r"(?:go|goes|going|went) on": "continue",
    r"dear(?:er)?": "expensive",
    r"mend(?:s|ed|ing)?": "fix",
    r"tells": "reports, says, shows",
    r"told": "given, reported",
    r"stands": "is, holds",
    r"by and by": "in time",
    r"behind (?:an?|the|each|every|this|that) (?:edit|span|splice|cut|prefix|message)": "after",
}
"""Turns of phrase, and what to write in their place."""

_CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<[^>]*>", re.DOTALL)
_HANGING = re.compile(r"(?:What|Whether|That|Which|How|Who|Where|As)\b")
_CLAUSE = re.compile(r"^#+ (?:What|Whether|That|Which|Who)\b.*[^?\n]$", re.MULTILINE)


def prose(page: Path) -> str:
    """A page without code and addresses, line by line as it is."""
    text = page.read_text(encoding="utf-8")
    return _CODE.sub(lambda found: "\n" * found[0].count("\n"), text)


def found_in(text: str) -> Iterator[str]:
    """Each banned turn of phrase with its line."""
    for pattern, better in BANNED.items():
        for match in re.finditer(rf"\b{pattern}\b", text, re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            yield f"line {line}: {match[0]!r}; write: {better}"


def test_pages_are_found() -> None:
    """The check below reads the whole documentation."""
    assert len(PAGES) > 45
    assert list(found_in("It goes on behind the edit, by and by.\nTold anew.")) != []
    assert list(found_in("It continues after the edit.")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_in_plain_english(page: Path) -> None:
    """No banned turn of phrase, and no heading that is a clause without a question mark."""
    text = prose(page)
    assert list(found_in(text)) == []
    assert _CLAUSE.findall(text) == []


def badly_begun(source: str) -> Iterator[str]:
    """Yield the first lines of docstrings that begin with a clause."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text is not None and _HANGING.match(text):
            yield text.splitlines()[0]


@pytest.mark.parametrize("folder", SOURCES)
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str) -> None:
    """No docstring begins with a clause such as "What is sent"."""
    assert list(badly_begun('def f():\n    """What is sent."""')) == ["What is sent."]
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = {path: [*badly_begun(path.read_text(encoding="utf-8"))] for path in paths}
    assert not {path.name: lines for path, lines in found.items() if lines}
