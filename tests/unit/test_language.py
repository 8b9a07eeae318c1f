"""The documentation, which holds the help of commands and settings, keeps clear of some turns of
phrase that no native reader expects."""

from __future__ import annotations

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
_CLAUSE = re.compile(r"^#+ (?:What|Whether|That|Which|Who)\b.*[^?]$", re.MULTILINE)


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
