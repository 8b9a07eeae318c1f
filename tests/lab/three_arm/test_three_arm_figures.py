"""The figures of the three-arm benchmark: sums, goals, and the shape of the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from leyline_lab.three_arm.figures import (
    BenchArm,
    FloorSample,
    Phase,
    PhaseFigures,
    Sample,
    goals,
    level_json,
)
from leyline_lab.three_arm.reference import Steps, logit_delta
from leyline_lab.three_arm.report import draw, print_levels
from leyline_lab.three_arm.workload import MustPrefill

MUST = MustPrefill(replacements=4, tail=1, sink=0, boundary=1, staged=1, pages=1)


def sample(ttft_ms: float, prefilled: int, **other: Any) -> Sample:
    """A request of 1,000 tokens."""
    spliced = other.pop("spliced", 0)
    return Sample(1000, spliced, prefilled, ttft_ms, ttft_ms + 50, **other)


def level(splice_ms: float, excess: int = 0) -> dict[str, Any]:
    """One concurrency: radix takes 400 ms, the floor 30, a forward 5."""
    figures = PhaseFigures(
        {
            BenchArm.RADIX: [sample(300, 500), sample(400, 500), sample(600, 500)],
            BenchArm.SPLICE: [
                sample(splice_ms, 7 + excess, spliced=493, logit_delta=delta, excess=excess)
                for delta in (1e-6, None, 3e-6)
            ],
            BenchArm.OFF: [],
        },
        [FloorSample(MUST, 993, 30.0, 5.0)],
    )
    return level_json(dict.fromkeys(Phase, figures), 1)


def test_the_document_has_the_members_that_are_promised() -> None:
    """Arms that ran, the floor with its items, the goals, and the edit beside the replay."""
    found = level(35)
    assert set(found) == {"radix", "splice", "floor", "goal", "edit"}
    assert found["splice"] == {
        "requests": 3,
        "prompt_tokens": 1000,
        "hit_ratio": 0.993,
        "spliced_tokens": 493,
        "prefilled_tokens": 7,
        "most_beyond_must_prefill": 0,
        "ttft_ms": {"p50": 35, "p90": 35},
        "e2e_ms": {"p50": 85, "p90": 85},
        "logit_delta": 3e-6,
    }
    assert found["radix"]["ttft_ms"] == {"p50": 400, "p90": 560}
    assert found["radix"]["logit_delta"] is None
    assert found["floor"]["must_prefill_tokens"] == MUST.total == 7
    items = {"replacements": 4, "tail": 1, "sink": 0, "boundary": 1, "pages": 1, "staged": 1}
    assert found["floor"]["must_prefill"] == items
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("splice_ms", "excess", "met"),
    [(35, 0, (True, True, True)), (42, 0, (True, True, False)), (50, 1, (False, False, False))],
)
def test_goals_are_met_or_not(splice_ms: float, excess: int, met: tuple[bool, ...]) -> None:
    """No token beyond the items; 1.3 floors and a forward per staged gap; a tenth of radix."""
    found = level(splice_ms, excess)["goal"]
    assert [goal["bound"] for goal in found.values()] == [0, 1.3 * 30 + 5, 0.1]
    assert tuple(goal["met"] for goal in found.values()) == met


def test_several_at_once_are_held_to_a_quarter_of_radix() -> None:
    """A missing measurement has no goal."""
    found = level(35)
    assert goals(found, 4)["ttft_share_of_radix"]["bound"] == 0.25
    assert set(goals({"splice": found["splice"]}, 4)) == {"prefilled"}
    assert goals({"radix": found["radix"]}, 4) == {}


def test_logit_deltas_end_where_the_answers_part() -> None:
    """The first position counts, later ones while both chose the same; broken texts never."""
    mine = Steps(("a", "b", "c"), ({"a": -1.0, "x": -2.0, "\ufffd": 0.0}, {"b": -1.0}, {"c": -9.0}))
    theirs = Steps(("a", "z", "c"), ({"a": -1.5, "\ufffd": -9.0}, {"b": -1.25}, {"c": -1.0}))
    assert logit_delta(mine, theirs) == 0.5
    same = Steps(("a", "b", "c"), theirs.top)
    assert logit_delta(mine, same) == 8.0
    assert logit_delta(mine, Steps(("q",), ({"q": -1.0},))) is None


def test_table_and_picture_take_the_document(tmp_path: Path) -> None:
    """A goal that isn't met is said so."""
    document = {"1": level(50, 1)}
    console = Console(width=100, record=True, file=(tmp_path / "out").open("w"))
    print_levels(console, document, "title")
    console.file.close()
    said = console.export_text()
    assert "prefilled: 1 of at most 0: NOT MET" in said and "3.0e-06" in said
    draw(document, tmp_path / "new" / "out.png")
    assert (tmp_path / "new" / "out.png").read_bytes().startswith(b"\x89PNG")
