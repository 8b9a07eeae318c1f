"""The table, the bars and the picture of a replay."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from leyline_lab.replay.plot import by_turn, draw, print_bars
from leyline_lab.replay.results import (
    Arm,
    ArmRun,
    ReplayReport,
    RequestResult,
)
from leyline_lab.replay.table import ArmProgress, comparison, print_report


def made_up_runs(turns: int = 12) -> dict[Arm, ArmRun]:
    """A growing session in which splicing keeps what a prefix cache loses."""
    radix, splice = [], []
    for turn in range(turns):
        prompt = 500 + 300 * turn
        kept = prompt // 3 if turn else 0
        moved = prompt // 2 if turn else 0
        radix.append(RequestResult(0, turn, prompt, kept, 0, prompt - kept, 400.0))
        splice.append(
            RequestResult(0, turn, prompt, kept, moved, prompt - kept - moved, 90.0, "spliced")
        )
    runs = {Arm.RADIX: ArmRun(Arm.RADIX, tuple(radix), ("radix: session x ends early",))}
    runs[Arm.SPLICE] = ArmRun(Arm.SPLICE, tuple(splice))
    return {Arm.OFF: runs[Arm.RADIX].switched_off(), **runs}


@pytest.fixture
def console() -> Console:
    """A wide terminal whose text is kept."""
    return Console(record=True, width=140, force_terminal=False)


def test_report_shows_every_figure(console: Console) -> None:
    """Table, reuse, outcomes and notes are all there."""
    report = ReplayReport(made_up_runs(2), {(0, 1): 300})
    print_report(console, report, "title")
    text = console.export_text()
    for part in ("exact prefixes only", "400 ms", "of 300 unchanged", "spliced 2"):
        assert part in text
    assert "note: radix: session x ends early" in text


def test_comparison_is_one_sentence() -> None:
    """With both real arms the gain is put into words; with one there is nothing to compare."""
    runs = made_up_runs()
    assert "instead of 400 ms" in comparison(runs)
    assert comparison({Arm.SPLICE: runs[Arm.SPLICE]}) == ""


def test_turns_average_over_sessions() -> None:
    """The picture of several sessions shows the mean of each turn."""
    run = ArmRun(
        Arm.RADIX,
        (
            RequestResult(0, 0, 100, 0, 0, 100, 1.0),
            RequestResult(1, 0, 200, 100, 0, 100, 1.0),
            RequestResult(0, 1, 10, 0, 0, 10, 1.0),
        ),
    )
    first, second = by_turn(run)
    assert (first.turn, first.cached, first.prefilled) == (1, 50.0, 100.0)
    assert (second.turn, second.prefilled) == (2, 10.0)


def test_picture_is_written(tmp_path: Path) -> None:
    """A PNG appears, folders are made, and one arm alone is drawn as well."""
    runs = made_up_runs()
    for name, drawn in (("all.png", runs), ("one.png", {Arm.SPLICE: runs[Arm.SPLICE]})):
        out = tmp_path / "new" / name
        draw(drawn, out, "A session")
        assert out.read_bytes().startswith(b"\x89PNG")


def test_bars_have_one_line_per_turn(console: Console) -> None:
    """The terminal picture has a bar per turn and arm, scaled to the longest."""
    print_bars(console, made_up_runs(3), width=40)
    lines = console.export_text().splitlines()
    assert len(lines) == 3 * (1 + 3) + 1
    longest = next(line for line in lines if line.rstrip().endswith("1,100"))
    assert sum(longest.count(shade) for shade in "█▓░") == 40


def test_reuse_is_shown_where_there_is_some(console: Console, tmp_path: Path) -> None:
    """An arm that reused content has it in the table, the bars and the picture; others don't."""
    plain = {Arm.SPLICE: ArmRun(Arm.SPLICE, (RequestResult(0, 0, 100, 50, 0, 50, 1.0),))}
    print_report(console, ReplayReport(plain, {}), "without")
    print_bars(console, plain)
    assert "reused (" not in console.export_text(clear=False)
    assert "reused  prefilled" not in console.export_text()
    reused = RequestResult(0, 0, 100, 25, 25, 25, 1.0, reused=25)
    runs = {Arm.SPLICE: ArmRun(Arm.SPLICE, (reused,))}
    print_report(console, ReplayReport(runs, {}), "with")
    print_bars(console, runs, width=40)
    text = console.export_text()
    assert "reused (copied from elsewhere)" in text
    assert "reused prefilled" in text.replace("  ", " ")
    assert "█" * 10 + "▓" * 10 + "▒" * 10 + "░" * 10 + " 100" in text
    draw(runs, tmp_path / "reused.png", "A session")
    assert (tmp_path / "reused.png").stat().st_size


def test_no_turns_no_bars(console: Console) -> None:
    """An empty run draws nothing."""
    print_bars(console, {Arm.RADIX: ArmRun(Arm.RADIX, ())})
    assert console.export_text() == ""


def test_progress_counts_per_arm(console: Console) -> None:
    """Each arm has a bar of its own."""
    with ArmProgress(console, 3) as progress:
        progress(Arm.RADIX, 0)
        progress(Arm.RADIX, 3)
        progress(Arm.SPLICE, 1)
    text = console.export_text()
    assert "3/3" in text and "1/3" in text
