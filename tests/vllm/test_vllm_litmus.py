"""The litmus suite and the probe on the real vLLM, in this process and through the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm_engine import shut_down

from leyline_engine.vllm.blocks import BlockCache
from leyline_engine.vllm.claim_desk import SchedulerClaims
from leyline_engine.vllm.claim_shelf import BlockShelf
from leyline_engine.vllm.withholding import Withholder
from leyline_lab.claims.cases import CASES, SPLICING_CASES
from leyline_lab.claims.litmus import (
    Case,
    CaseResult,
    OpenRuntime,
    run_case,
)
from leyline_lab.claims.sweep import SweepPolicy, run_sweep
from leyline_lab.claims.verdict import Outcome
from leyline_lab.claims.vllm_runtime import engine_core, open_vllm

ALL = {case.name: case for case in CASES + SPLICING_CASES}
BLOCK = 32
TIMEOUT_S = 500
BOUNDARY = 130
"""Pages that a claim of 60 and a request of 70 need together."""
NEEDED = 69
"""Pages of the request, of which one of the 70 is the reserve that vLLM doesn't keep."""


@pytest.fixture(scope="module")
def opener() -> Iterator[OpenRuntime]:
    """vLLM, started once for the cases of this file."""
    with warnings.catch_warnings():
        # vLLM's own, of the libraries below it.
        warnings.simplefilter("ignore")
        core = engine_core(BLOCK)
    yield partial(open_vllm, page=BLOCK)
    engine_core.cache_clear()
    shut_down(core)


@pytest.mark.parametrize("case", ALL.values(), ids=list(ALL))
def test_vllm_shows_what_a_conforming_engine_shows(case: Case, opener: OpenRuntime) -> None:
    """Its outcomes, read from events alone, are the case's; every spoilt trace reads otherwise."""
    result = run_case(case, opener)
    assert result.verdict.void == ""
    assert result.states_agree and result.told == case.told
    assert result.missed == () and result.mutants > 2 * len(result.events)
    assert result.passed


def events(result: CaseResult, kind: str) -> list[Any]:
    """The events of one kind."""
    return [event for event in result.events if event["event"] == kind]


def test_requests_take_blocks_as_they_need_them(opener: OpenRuntime) -> None:
    """A prompt's blocks come at once, its answer's one by one, and only what is in the way goes."""
    result = run_case(ALL["ordinary_eviction"], opener)
    active = [event for event in events(result, "allocated") if event["request"] == "active"]
    assert [event["pages"] for event in active] == [8, 1, 1]
    gone = [tuple(run) for event in events(result, "evicted") for run in event["runs"]]
    assert gone == [("old", place, place + 1) for place in range(7, 1, -1)]


def test_a_removed_path_is_one_loss_to_its_claim(opener: OpenRuntime) -> None:
    """The event names all blocks that the claim loses, not only the first."""
    (lost,) = events(run_case(ALL["harm"], opener), "lost")
    assert [tuple(run) for run in lost["runs"]] == [("old", 4, 12)]


def test_an_engine_that_only_says_it_locks_is_found_out(
    opener: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives away what was promised, and the reader sees it go."""

    def nothing(self: BlockShelf, *_: object) -> None:
        """No block is held."""

    monkeypatch.setattr(BlockShelf, "lock", nothing)
    result = run_case(ALL["accepted_hard_claim"], opener)
    assert result.verdict.void.endswith("a locked page was evicted")
    assert not result.passed


def test_an_engine_that_ignores_ranks_fails(
    opener: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least recent first, whatever the priority: the case names another outcome."""

    def nothing(self: BlockShelf, count: int) -> None:
        """Nothing is moved to the end of the queue."""

    monkeypatch.setattr(BlockShelf, "_make_way", nothing)
    result = run_case(ALL["soft_priority"], opener)
    assert not result.passed and result.verdict.void == ""
    assert result.verdict.of(Outcome.SOFT_EVICTION)
    assert not result.verdict.of(Outcome.SOFT_PRIORITY)


def test_an_engine_that_keeps_what_must_not_be_admitted_fails(
    opener: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that a look-up still finds contradict what the request said when it came."""

    def nothing(self: Withholder, *_: object) -> None:
        """Nothing is withheld."""

    monkeypatch.setattr(Withholder, "turn", nothing)
    result = run_case(ALL["write_no_admit_alone"], opener)
    assert result.verdict.void.endswith("kept what must not be admitted")


def test_an_engine_that_hides_what_it_gave_away_fails(
    opener: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its book goes on with a claim of which the reader has seen the blocks go."""

    def nothing(self: BlockShelf, blocks: object) -> None:
        """No claim hears of it."""

    monkeypatch.setattr(BlockShelf, "_given", nothing)
    result = run_case(ALL["demotion"], opener)
    assert result.verdict.void.endswith("a claim that is over still holds pages")


def test_an_engine_that_loses_blocks_in_silence_fails(
    opener: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loss and no harm are read where the claim's blocks can't be found any more."""

    def nothing(self: BlockCache, *removal: object) -> None:
        """No claim hears of it."""

    monkeypatch.setattr(BlockCache, "_tell_hiding", nothing)
    result = run_case(ALL["harm"], opener)
    assert not result.passed
    assert not result.verdict.of(Outcome.LOSS)


def test_an_engine_that_never_refuses_never_answers(
    opener: OpenRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that claims leave no room for waits for ever in vLLM's queue."""
    monkeypatch.setattr(SchedulerClaims, "refuse", lambda *_: None)
    with pytest.raises(RuntimeError, match="doesn't end"):
        run_case(ALL["active_refusal"], opener)


def test_the_probe_shows_the_papers_boundary(opener: OpenRuntime) -> None:
    """Ten pages below it, a hard claim refuses, and is named; the others serve, and lose."""
    rows = run_sweep(opener, (BOUNDARY - 10,))
    assert [row.policy for row in rows] == list(SweepPolicy)
    for row in rows:
        check_row(msgspec.json.decode(msgspec.json.encode(row)))


def check_row(row: dict[str, Any]) -> None:
    """vLLM gives away block by block: no claimed page goes that isn't needed."""
    where = f"{row['policy']} in {row['usable']}"
    fits, hard = row["usable"] >= BOUNDARY, row["policy"] == "hard"
    admits = row["policy"] != "write_no_admit"
    assert not row["void"], where
    assert row["served"] is (fits or not hard), where
    assert row["blocking"] == ([] if row["served"] else ["a/c"]), where
    assert row["kept"] == (NEEDED if row["served"] and admits else 0), where
    left = 60 if hard else min(60, row["usable"] - NEEDED)
    assert (row["resident"], row["lost"]) == (left, 60 - left), where


@pytest.mark.nightly
@pytest.mark.parametrize("page", [32, 64])
def test_the_commands_write_what_they_read(page: int, tmp_path: Path) -> None:
    """All fourteen cases pass, and the whole probe shows the boundary, with blocks of each size."""
    litmus = run_lab("litmus", page, tmp_path / "litmus.json")
    assert (litmus["engine"], litmus["page_size"]) == ("vllm", page)
    assert (litmus["passed"], litmus["of"]) == (14, 14)
    for case in litmus["cases"]:
        assert case["passed"] and case["mutants"] and not case["missed"], case["name"]
        assert case["events"][0]["page_size"] == page
    sweep = run_lab("sweep", page, tmp_path / "sweep.json")
    assert len(sweep["rows"]) == 28
    for row in sweep["rows"]:
        check_row(row)


def run_lab(command: str, page: int, out: Path) -> dict[str, Any]:
    """The file that a command of the laboratory writes."""
    options = ["--engine", "vllm", "--page-size", str(page), "--json", str(out)]
    run = subprocess.run(
        [sys.executable, "-P", "-m", "leyline_lab.claims", command, *options],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    written: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return written
