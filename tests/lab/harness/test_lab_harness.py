"""The frame of measurements: percentiles, tables in pages, and facts of processes."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lab.harness import machine, markdown
from leyline_lab.harness.statistics import median_interval, percentile

MARK = markdown.mark("some-table")
TIMES = st.lists(st.floats(0, 1e6), min_size=2, max_size=50)


@given(TIMES)
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    """The median and the 99th percentile agree with ``statistics``."""
    assert percentile(values, 0.5) == pytest.approx(median(values))
    wanted = quantiles(values, n=100, method="inclusive")[98]
    assert percentile(values, 0.99) == pytest.approx(wanted)


@given(TIMES)
def test_the_interval_encloses_the_median(values: list[float]) -> None:
    """The median lies between two of the values."""
    middle, low, high = median_interval(values)
    assert low <= middle <= high and {low, high} <= set(values)


def test_a_table_replaces_the_one_under_its_mark(tmp_path: Path) -> None:
    """The rest of a page stays, and what is shown is the table."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARK}\nold\n{markdown.END}\nafter\n", encoding="utf-8")
    text = markdown.table(("name", "tokens"), [("a", 1), ("b", 22)])
    markdown.write(text, page, MARK)
    written = page.read_text(encoding="utf-8")
    assert text.splitlines()[1] == "|---|---:|"
    assert written == f"before\n{MARK}\n{text}\n{markdown.END}\nafter\n"
    assert markdown.shown(written, MARK).strip() == text


def test_a_page_without_the_mark_is_refused() -> None:
    """A table is never put into a page that has no place for it."""
    with pytest.raises(ValueError, match="no marks"):
        markdown.put_into("a page", "a table", MARK)


def test_facts_are_those_of_this_process() -> None:
    """CPU time grows with work, memory is there, and an unknown figure is an error."""
    before = machine.cpu_s(os.getpid())
    sum(range(200_000))
    assert machine.cpu_s(os.getpid()) > before
    assert 1 < machine.memory_mib(os.getpid()) <= machine.memory_mib(os.getpid(), "VmHWM")
    assert machine.family(os.getpid())[0] == os.getpid()
    with pytest.raises(RuntimeError, match="has ended"):
        machine.memory_mib(os.getpid(), "VmNone")
