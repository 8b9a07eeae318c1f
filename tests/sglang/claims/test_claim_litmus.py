"""The litmus suite and the probe on the real SGLang, through the laboratory's commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# The same cases run on the replay engine at each commit; here SGLang starts for them alone.
pytestmark = pytest.mark.nightly

TIMEOUT_S = 280
PAGES = [1, 16, 64]
BOUNDARY = 130
"""Pages that a claim of 60 and a request of 70 need together."""

# One process for all commands: SGLang starts once.
SCRIPT = """
import sys
from leyline_lab.claims.cli import app

for command, out in zip(("litmus", "sweep"), sys.argv[2:]):
    options = ["--engine", "sglang", "--page-size", sys.argv[1], "--json", out]
    try:
        app([command, *options], standalone_mode=False)
    except SystemExit as ended:
        sys.exit(ended.code)
"""

Written = dict[str, Any]


def run_lab(page: int, *outs: Path) -> list[Written]:
    """The files written by ``litmus`` and, where there is a second, by ``sweep``."""
    run = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(page), *map(str, outs)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert all(out.exists() for out in outs), run.stderr[-4000:]
    assert "Traceback" not in run.stderr, run.stderr[-4000:]
    return [json.loads(out.read_text(encoding="utf-8")) for out in outs]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    """The files that both commands write with pages of one token."""
    folder = tmp_path_factory.mktemp("litmus")
    return run_lab(1, folder / "litmus.json", folder / "sweep.json")


@pytest.fixture(scope="module", params=PAGES)
def litmus(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Written]:
    """The file that ``litmus`` writes, and the tokens per page."""
    if request.param == 1:
        return 1, request.getfixturevalue("results")[0]
    (written,) = run_lab(request.param, tmp_path_factory.mktemp("litmus") / "litmus.json")
    return request.param, written


def test_sglang_keeps_the_contract(litmus: tuple[int, Written]) -> None:
    """All fourteen cases read as they should, and the book agrees with the reader."""
    page, written = litmus
    assert (written["engine"], written["passed"], written["of"]) == ("sglang", 14, 14)
    assert all(case["events"][0]["page_size"] == page for case in written["cases"])
    check_cases(written)


def check_cases(litmus: Written) -> None:
    """Each case passed, by its events alone."""
    assert len({case["name"] for case in litmus["cases"]}) == 14
    for case in litmus["cases"]:
        assert case["passed"], case["name"]
        assert case["states_agree"], case["name"]
        assert not case["verdict"]["void"], case["name"]


def test_every_spoilt_trace_reads_otherwise(litmus: tuple[int, Written]) -> None:
    """An event dropped, or two swapped that depend on one another, is noticed in each case."""
    for case in litmus[1]["cases"]:
        assert case["mutants"] > len(case["events"]), case["name"]
        assert not case["missed"], case["name"]


def test_the_probe_refuses_below_the_boundary_and_serves_above(results: list[Written]) -> None:
    """Hard claims keep all their pages and refuse by name; without, the request costs residents."""
    _, sweep = results
    rows = sweep["rows"]
    assert len(rows) == 28
    for row in rows:
        where = f"{row['policy']} in {row['usable']}"
        assert not row["void"], where
        fits = row["usable"] >= BOUNDARY
        refused = row["policy"] == "hard" and not fits
        assert row["served"] is not refused, where
        assert row["blocking"] == (["a/c"] if refused else []), where
        assert row["resident"] + row["lost"] == 60, where
        if fits or row["policy"] == "hard":
            assert row["resident"] == 60, where
        else:
            # SGLang evicts a leaf as a whole: what it took may be more than was wanted.
            assert row["resident"] <= row["usable"] - 70, where


def test_what_is_not_admitted_leaves_nothing(results: list[Written]) -> None:
    """Write-no-admit protects nothing: it takes as much as the others, and leaves no page."""
    _, sweep = results
    kept = {(row["policy"], row["usable"]): row["kept"] for row in sweep["rows"] if row["served"]}
    assert {pages for (policy, _), pages in kept.items() if policy == "write_no_admit"} == {0}
    assert {pages for (policy, _), pages in kept.items() if policy != "write_no_admit"} == {69}


def test_what_is_written_can_be_read_anew(litmus: tuple[int, Written]) -> None:
    """The verdicts follow from the events in the file, and from nothing else."""
    import msgspec

    from leyline_engine.claims.events import AnyEvent
    from leyline_lab.claims.reader import read
    from leyline_lab.claims.verdict import TraceVerdict

    for case in litmus[1]["cases"]:
        events = msgspec.convert(case["events"], list[AnyEvent])
        assert read(events) == msgspec.convert(case["verdict"], TraceVerdict), case["name"]
