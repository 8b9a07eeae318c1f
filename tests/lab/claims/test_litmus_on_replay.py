"""The litmus suite and the paper's probe on the real replay engine."""

from __future__ import annotations

from functools import partial

import pytest

from leyline_engine.claims.place import ClaimPlace
from leyline_engine.claims.protection import ClaimKey
from leyline_lab.claims.cases import CASES, SPLICING_CASES
from leyline_lab.claims.litmus import Case, run_case
from leyline_lab.claims.replay_runtime import open_replay
from leyline_lab.claims.sweep import SweepPolicy, run_sweep
from leyline_lab.claims.verdict import Outcome
from leyline_replay.cache.radix import Node
from leyline_replay.cache.shelf import TreeShelf

ALL = {case.name: case for case in CASES + SPLICING_CASES}


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("case", ALL.values(), ids=list(ALL))
def test_replay_shows_what_a_conforming_engine_shows(case: Case, page: int) -> None:
    """Its outcomes, read from events alone, are the case's; every spoilt trace reads otherwise."""
    result = run_case(case, partial(open_replay, page=page))
    assert result.verdict.void == ""
    assert result.states_agree and result.told == case.told
    assert result.missed == () and result.mutants > 2 * len(result.events)
    assert result.passed


def test_an_engine_that_only_says_it_locks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It evicts what it has promised, and the reader sees it go."""

    def nothing(self: TreeShelf, claim: ClaimKey, place: ClaimPlace, length: int) -> None:
        """No lock is taken."""

    monkeypatch.setattr(TreeShelf, "lock", nothing)
    result = run_case(ALL["accepted_hard_claim"], open_replay)
    assert result.verdict.void.endswith("a locked page was evicted")
    assert not result.passed


def test_an_engine_that_ignores_ranks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Least recent first, whatever the priority: the case names another outcome."""
    monkeypatch.setattr(Node, "rank", 0)
    result = run_case(ALL["soft_priority"], open_replay)
    assert not result.passed and result.verdict.void == ""
    assert result.verdict.of(Outcome.SOFT_EVICTION)
    assert not result.verdict.of(Outcome.SOFT_PRIORITY)


def test_an_engine_that_keeps_what_must_not_be_admitted_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Publishing it contradicts what the request said when it came."""
    from leyline_replay.engine import ReplayEngine

    start = ReplayEngine._start

    def admitting(self: ReplayEngine, *args: object, **options: object) -> object:
        return start(self, *args, **{**options, "admits": True})  # type: ignore[arg-type]

    monkeypatch.setattr(ReplayEngine, "_start", admitting)
    result = run_case(ALL["write_no_admit_alone"], open_replay)
    assert result.verdict.void.endswith("kept what must not be admitted")


def test_the_probe_shows_the_papers_boundary() -> None:
    """Below 130 pages a hard claim refuses, and is named; the others serve, and lose."""
    rows = {(row.policy, row.usable): row for row in run_sweep(open_replay, (120, 130))}
    assert not any(row.void for row in rows.values())
    for policy in SweepPolicy:
        below, above = rows[policy, 120], rows[policy, 130]
        hard = policy is SweepPolicy.HARD
        assert (above.served, above.resident, above.blocking) == (True, 60, ())
        assert below.served is not hard
        assert below.blocking == (("a/c",) if hard else ())
        assert below.resident == 60 if hard else below.lost > 0
