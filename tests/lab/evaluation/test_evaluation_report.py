"""A run becomes a report: whole or not at all, readable without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from leyline_lab.errors import JournalError
from leyline_lab.evaluation.report import shown_cells
from leyline_lab.evaluation.running import evaluate, journal_of
from leyline_lab.fidelity.experiment import (
    Chart,
    Experiment,
    Record,
    ResultTable,
    Scale,
)

PAPER = "Table 4: <6/6> & more."


class Doubles:
    """An experiment on numbers, which may be interrupted."""

    name = "doubles"
    title = "Doubles"

    def __init__(self, stop_at: int | None, kind: str) -> None:
        self.measured = 0
        self._stop_at = stop_at
        self._kind = kind

    def cases(self, scale: Scale) -> Sequence[str]:
        """Three numbers, or six."""
        return [str(number) for number in range(3 if scale is Scale.QUICK else 6)]

    def measure(self, case: str) -> Record:
        """Twice the case."""
        if self.measured == self._stop_at:
            raise KeyboardInterrupt
        self.measured += 1
        return {"double": 2 * int(case)}

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """A row with an interval for each case."""
        doubles = [int(record["double"] or 0) for record in records.values()]
        return ResultTable(
            title=self.title,
            question="How much?",
            columns=("n", "double", "double low", "double high", "low"),
            rows=tuple((n, d, d - 1, d + 0.5, None) for n, d in enumerate(doubles)),
            finding="Numbers <double>.",
            paper=PAPER,
            chart=Chart(
                kind=self._kind,
                x_label="n",
                y_label="double",
                x=tuple(range(len(doubles))),
                series={"a": tuple(doubles), "b": (None, *doubles[1:])},
            ),
        )


class Numbers:
    """An engine's offer to be evaluated."""

    engine = "replay"
    model = "tiny, small"
    fingerprint = "f1, f2"
    notes = ("Log <probabilities>.",)
    left_out: Mapping[str, str] = {"removal": "it needs <logits>"}

    def __init__(self, stop_at: int | None = None, kind: str = "bar") -> None:
        self.doubles = Doubles(stop_at, kind)
        self.identity = {"model": self.model}

    def experiments(self) -> Sequence[Experiment]:
        """The only one."""
        return [self.doubles]


def run(numbers: Numbers, out: Path, html: Path | None = None) -> dict[str, Any]:
    """A full run without a progress bar."""
    return evaluate(numbers, Scale.FULL, out, html, lambda left: lambda title: None)


def without_date(out: Path) -> dict[str, Any]:
    """A report as JSON, but for its date."""
    document: dict[str, Any] = json.loads(out.read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", document.pop("date"))
    return document


def test_an_interrupted_run_continues_to_the_same_report(tmp_path: Path) -> None:
    """Only the missing cases are measured, the report is equal, and its journal is gone."""
    whole, resumed = tmp_path / "whole.json", tmp_path / "resumed.json"
    run(Numbers(), whole)
    with pytest.raises(KeyboardInterrupt):
        run(Numbers(stop_at=2), resumed)
    assert not resumed.exists() and journal_of(resumed).exists()
    again = Numbers()
    run(again, resumed)
    assert again.doubles.measured == 4
    assert without_date(resumed) == without_date(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed.json", "whole.json"]


def test_the_report_names_what_was_measured(tmp_path: Path) -> None:
    """The JSON has version, engine, model, fingerprint, scale, date, notes, what is left out, and
    tables, and no more; the page shows the notes and what is left out."""
    html = tmp_path / "r.html"
    run(Numbers(), tmp_path / "r.json", html)
    document = without_date(tmp_path / "r.json")
    facts = {"version", "engine", "model", "model_fingerprint", "scale", "notes", "left_out"}
    assert set(document) == facts | {"tables", "profiles"}
    assert document["notes"] == ["Log <probabilities>."]
    page = html.read_text()
    assert "Log &lt;probabilities&gt;." in page and "it needs &lt;logits&gt;" in page
    assert document["scale"] == "full" and document["model_fingerprint"] == "f1, f2"
    assert document["tables"]["doubles"]["rows"][2] == [2, 4, 3, 4.5, None]


def test_another_model_s_journal_is_not_continued(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(KeyboardInterrupt):
        run(Numbers(stop_at=1), tmp_path / "r.json")
    other = Numbers()
    other.identity = {"model": "other"}
    with pytest.raises(JournalError, match=r"r\.json\.journal"):
        run(other, tmp_path / "r.json")


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """Neither file is there if one can't be written, the earlier one stays, and so do the cases."""
    out, html = tmp_path / "r.json", tmp_path / "r.html"
    out.write_text("earlier")
    (tmp_path / ".r.html.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="space"):
        run(Numbers(), out, html)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.json.journal"]
    assert out.read_text() == "earlier"
    again = Numbers()
    run(again, out, html)
    assert again.doubles.measured == 0 and html.exists()


@pytest.mark.parametrize("kind", ["bar", "line"])
def test_the_page_stands_alone(tmp_path: Path, kind: str) -> None:
    """It says what was found, beside the paper's figures, with a drawing, and loads nothing."""
    html = tmp_path / "r.html"
    run(Numbers(kind=kind), tmp_path / "r.json", html)
    page = html.read_text()
    assert "Numbers &lt;double&gt;." in page and "&lt;6/6&gt; &amp; more." in page
    assert page.index("Findings") < page.index("<section")
    assert "<td>4 (3 to 4.5)</td>" in page and "double low" not in page
    assert not re.search(r"(?:src|href)=[\"'](?!#)|url\((?!#)|@import|<script", page)
    drawing = page[page.index("<svg") : page.index("</svg>") + len("</svg>")]
    text = "".join(ElementTree.fromstring(drawing).itertext())  # noqa: S314 - our own
    assert "double" in text


def test_equal_figures_are_an_equal_page(tmp_path: Path) -> None:
    """Nothing in it depends on chance but its date."""
    pages = []
    for name in ("a", "b"):
        html = tmp_path / f"{name}.html"
        document = run(Numbers(), tmp_path / f"{name}.json", html)
        pages.append(html.read_text().replace(document["date"], ""))
    assert pages[0] == pages[1]


def test_a_column_called_low_is_no_bound_of_another() -> None:
    """Bounds are merged into the column of their name alone."""
    table = {"columns": ["x", "y low", "x low", "x high"], "rows": [[0.5, 1, 0.25, None]]}
    assert shown_cells(table) == (["x", "y low"], [["0.5 (0.25 to –)", "1"]])
