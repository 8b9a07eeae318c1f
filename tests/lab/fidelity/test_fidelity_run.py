"""A run of experiments: it continues after any interruption, and never mixes two models' cases."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_lab.errors import JournalError
from leyline_lab.fidelity.experiment import Record, ResultTable, Scale
from leyline_lab.fidelity.journal import Journal, count_left, measure_all
from leyline_lab.fidelity.statistics import difference, mean, share

MODEL = {"model": "tiny", "fingerprint": "f"}


class Squares:
    """An experiment that counts its measurements, and may be interrupted."""

    name = "squares"
    title = "Squares"

    def __init__(self, stop_at: int | None = None) -> None:
        self.measured: list[str] = []
        self._stop_at = stop_at

    def cases(self, scale: Scale) -> Sequence[str]:
        """Ten numbers, or three."""
        return [str(number) for number in range(3 if scale is Scale.QUICK else 10)]

    def measure(self, case: str) -> Record:
        """The square of a case."""
        if len(self.measured) == self._stop_at:
            raise KeyboardInterrupt
        self.measured.append(case)
        return {"square": int(case) ** 2}

    def table(self, records: Mapping[str, Record]) -> ResultTable:
        """A row for each case."""
        rows = tuple((case, record["square"]) for case, record in records.items())
        return ResultTable(
            title=self.title, question="?", columns=("n", "n²"), rows=rows, finding="It grows."
        )


def run(path: Path, experiment: Squares, scale: Scale = Scale.FULL) -> dict[str, Any]:
    """All tables."""
    with Journal(path, MODEL) as journal:
        return measure_all([experiment], journal, scale, lambda _: None)


@given(stops=st.lists(st.integers(0, 4), max_size=4), torn=st.binary(max_size=20))
def test_an_interrupted_run_continues(
    tmp_path_factory: pytest.TempPathFactory, stops: list[int], torn: bytes
) -> None:
    """Each case is measured once, whatever ended the runs before, also in the middle of a line."""
    path = tmp_path_factory.mktemp("run") / "journal"
    measured: list[str] = []
    for stop in stops:
        experiment = Squares(stop)
        try:
            run(path, experiment)
        except KeyboardInterrupt:
            with path.open("ab") as file:
                file.write(torn.replace(b"\n", b""))
        measured += experiment.measured
    last = Squares()
    tables = run(path, last)
    assert measured + last.measured == [str(number) for number in range(10)]
    assert json.loads(json.dumps(tables))["squares"]["rows"] == [[str(n), n * n] for n in range(10)]


def test_a_full_run_continues_a_quick_one(tmp_path: Path) -> None:
    """The quick run's cases are among the full run's."""
    run(tmp_path / "journal", Squares(), Scale.QUICK)
    experiment = Squares()
    with Journal(tmp_path / "journal", MODEL) as journal:
        assert count_left([experiment], journal, Scale.FULL) == 7
    run(tmp_path / "journal", experiment)
    assert len(experiment.measured) == 7


@pytest.mark.parametrize("content", [b'{"identity": {}}\n', b"[]\n", b"{\n", b'{"a": 1}\n{"b"'])
def test_another_run_s_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    """Cases of another model, or of no run at all, are an error that names the file."""
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(JournalError, match="journal"):
        Journal(path, MODEL)


def test_a_line_of_another_shape_is_refused(tmp_path: Path) -> None:
    """So is a whole line that is no case."""
    path = tmp_path / "journal"
    run(path, Squares(), Scale.QUICK)
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(JournalError, match="remove it"):
        Journal(path, MODEL)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """The error says how to continue, and the cases before it stay."""
    run(tmp_path / "journal", Squares(), Scale.QUICK)
    with (
        Journal(tmp_path / "journal", MODEL) as journal,
        Path("/dev/full").open("w", encoding="utf-8") as full,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(journal, "_file", full)
        with pytest.raises(JournalError, match="run the same command again"):
            journal.add("squares", "3", {"square": 9})
        patch.undo()
        with pytest.raises(OSError, match="space"):
            full.close()
    with Journal(tmp_path / "journal", MODEL) as journal:
        assert len(journal.of("squares")) == 3


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_share_s_interval_holds_it(case: tuple[int, int]) -> None:
    """It lies within 0 and 1, and is narrower for more cases."""
    found = share(*case)
    assert 0 <= found.low <= found.value <= found.high <= 1
    more = share(case[0] * 4, case[1] * 4)
    assert more.high - more.low < found.high - found.low


def test_intervals_are_those_of_the_textbook() -> None:
    """Wilson's interval of 10 in 20, and the normal one of a mean and of a paired difference."""
    half = share(10, 20)
    assert (round(half.low, 3), round(half.high, 3)) == (0.299, 0.701)
    found = mean([1.0, 2.0, 3.0, 4.0])
    assert (round(found.low, 3), round(found.high, 3)) == (1.235, 3.765)
    assert difference([True, True, False], [True, False, False]).value == pytest.approx(1 / 3)
    for wrong in (lambda: share(2, 1), lambda: share(0, 0), lambda: mean([])):
        with pytest.raises(ValueError, match="no"):
            wrong()
