"""Figures in the guides that count parts of Leyline, against these parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.boards import BOARDS, REPOSITORY
from support.helm_values import SETS

from leyline_lab.demo.run import shipped_trace
from leyline_lab.fidelity.rotary_models import MODELS
from leyline_policies.builtin import BUILTINS
from leyline_policies.grammar import MAX_STEPS

DOCS = REPOSITORY / "docs"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WORDS += ("eleven", "twelve")
NUMBER = rf"(?:\d+|{'|'.join(WORDS)})"
PAGES = {
    str(path.relative_to(REPOSITORY)): " ".join(path.read_text(encoding="utf-8").split())
    for path in (
        *(REPOSITORY / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
        *sorted(DOCS.rglob("*.md")),
    )
    if path.parent.name not in ("api", "results")
}
"""Texts by path, each in one line; written pages and records of measurements aside."""

NOUNS = "policies|boards|panels|alerts|alert rules|metrics|clients|agents and SDKs|sets of values"
COUNTING = re.compile(rf"\b{NUMBER} (?:[\w-]+ )?(?:{NOUNS})\b", re.IGNORECASE)
"""Figures of parts that come and go; each is in :data:`COUNTS`, or in :data:`OTHERS`."""
OTHERS = {
    "the four policies above": "SGLang's router's",
    "the three policies that cut": "those of a measurement",
    "two of the three write policies": "SGLang's",
    "Two alerts watch over this": "named in the sentence",
}


@dataclass(frozen=True, slots=True)
class Count:
    """A figure: where it stands, as a pattern with a group, and what it counts."""

    pattern: str
    number: int

    def found(self) -> Iterator[tuple[str, str]]:
        """Page and figure of each place that has it."""
        for page, text in PAGES.items():
            yield from ((page, figure) for figure in re.findall(self.pattern, text))


CLIENTS = len(re.findall(r"^\| \[", (DOCS / "clients.md").read_text("utf-8"), re.MULTILINE))
"""Rows of the table of clients, each of which begins with a link to the client's section."""
COUNTS = (
    Count(rf"olicies\]\([\w/]*policies\.md\)(?: \||:) the ({NUMBER}) that ship", len(BUILTINS)),
    Count(rf"each a policy or a pipeline, ({NUMBER}) policies at most", MAX_STEPS),
    Count(rf"({NUMBER}) agents and SDKs", CLIENTS),
    Count(rf"Claude Code, Codex, opencode and ({NUMBER}) more", CLIENTS - 3),
    Count(rf"shows where to set it for ({NUMBER}) of them", CLIENTS),
    Count(rf"({NUMBER}) Grafana boards", len(BOARDS)),
    Count(rf"({NUMBER}) sets of values", len(SETS)),
    Count(rf"rotary parameters of ({NUMBER}) current models", len(MODELS)),
    Count(
        rf"recorded agent session of ({NUMBER}) turns",
        shipped_trace().requests,
    ),
)


def _value(figure: str) -> int:
    return int(figure) if figure.isdigit() else WORDS.index(figure.lower())


@pytest.mark.parametrize("count", COUNTS, ids=lambda count: count.pattern[:40])
def test_figures_are_the_numbers_of_what_they_count(count: Count) -> None:
    """Each place that gives the number of a part gives the right one, and there is such a place."""
    found = list(count.found())
    assert found
    assert [(page, figure) for page, figure in found if _value(figure) != count.number] == []


def test_no_figure_is_counted_by_hand() -> None:
    """A page that counts policies, boards, alerts or clients has its figure tested here."""
    known = re.compile("|".join([*(count.pattern for count in COUNTS), *map(re.escape, OTHERS)]))
    unknown = {page: COUNTING.findall(known.sub("", text)) for page, text in PAGES.items()}
    assert {page: figures for page, figures in unknown.items() if figures} == {}


def test_other_figures_are_still_there() -> None:
    """No excuse outlives the sentence that it is for."""
    assert [each for each in OTHERS if not any(each in text for text in PAGES.values())] == []
