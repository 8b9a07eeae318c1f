"""The litmus suite on the MicroRuntime, its mutants, and the paper's probe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import pytest

from leyline_engine.claims.events import AnyEvent, EventLedger, Locked, Ticked
from leyline_lab.claims import litmus
from leyline_lab.claims.cases import CASES
from leyline_lab.claims.litmus import CaseResult, open_micro, run_case
from leyline_lab.claims.micro import MicroRuntime, Request, _Page
from leyline_lab.claims.mutants import dependent, mutants
from leyline_lab.claims.reader import read
from leyline_lab.claims.sweep import SweepPolicy, run_sweep
from leyline_lab.claims.verdict import Outcome, TraceVerdict

NAMES = [
    "ordinary_eviction",
    "soft_priority",
    "write_no_admit_alone",
    "accepted_hard_claim",
    "materialization_failure",
    "demotion",
    "expiry",
    "release",
    "harm",
    "active_refusal",
    "refusal_then_success_after_expiry",
    "revision_race",
    "two_tenants",
]


def test_the_suite_has_the_thirteen_cases() -> None:
    """It has each by name, once."""
    assert [case.name for case in CASES] == NAMES


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_micro_shows_what_a_conforming_engine_shows(case: litmus.Case) -> None:
    """The outcomes, read from events alone, are the case's; the book agrees with the reader."""
    result = run_case(case, open_micro)
    assert result.verdict.void == ""
    assert result.states_agree
    assert result.told == case.told
    assert result.passed


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_spoilt_trace_reads_otherwise(case: litmus.Case) -> None:
    """One event dropped, or two swapped of which one depends on the other."""
    result = run_case(case, open_micro)
    assert result.missed == ()
    assert result.mutants > 2 * len(result.events)


def test_a_case_fails_where_outcomes_or_answers_differ() -> None:
    """The expectation is compared, not only computed."""
    case = next(case for case in CASES if case.name == "two_tenants")
    assert not run_case(replace(case, outcomes=case.outcomes[:-1]), open_micro).passed
    assert not run_case(replace(case, told=("no",)), open_micro).passed


def test_a_reader_that_doesnt_look_misses_the_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation test can fail: a verdict by numbers of events alone lets swaps through."""

    def by_count(events: Iterable[AnyEvent]) -> TraceVerdict:
        return TraceVerdict(void=f"{len(list(events))} events")

    monkeypatch.setattr(litmus, "read", by_count)
    result = run_case(CASES[0], open_micro)
    assert result.missed and all(name.endswith("swapped") for name in result.missed)


class EvictsLockedPages(MicroRuntime):
    """An engine that breaks the contract in silence: locks don't reach its pages."""

    def _apply(self, effects: object) -> None:
        """Carry out nothing."""


def test_an_engine_that_only_says_it_locks_is_found_out() -> None:
    """Its book stops it, or the reader's account of the locks voids the trace."""
    events: list[AnyEvent] = []
    runtime = EvictsLockedPages(10, page_size=16, limits=litmus.LIMITS, sink=events.append)
    stage = litmus.LitmusStage(runtime)
    stage.keep("old", 4)
    stage.claim("old", 4)
    stage.keep("young", 4)
    with pytest.raises(RuntimeError, match="can't take evict"):
        stage.serve("active", "other", 6)
    assert "a locked page was evicted" in read(events).void


def test_an_engine_that_ignores_ranks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Least recent first, whatever the priority: the case names another outcome."""
    monkeypatch.setattr(_Page, "rank", property(lambda page: 0))
    result = run_case(next(case for case in CASES if case.name == "soft_priority"), open_micro)
    assert not result.passed
    assert result.verdict.of(Outcome.SOFT_EVICTION)
    assert not result.verdict.of(Outcome.SOFT_PRIORITY)


def test_traces_survive_the_jsonl_file() -> None:
    """The written trace reads as it happened."""
    for case in CASES:
        result = run_case(case, open_micro)
        again = [msgspec.convert(event, AnyEvent) for event in result.events]
        assert read(again) == result.verdict


def test_a_trace_that_begins_late_or_skips_a_number_is_void() -> None:
    """A bounded ledger forgets its beginning; the reader doesn't guess it."""
    ledger = EventLedger(max_events=3)
    runtime = MicroRuntime(10, sink=ledger.append)
    runtime.start(Request("r", "a", "s", "x", 16))
    runtime.finish("r")
    assert len(ledger) == 3
    assert "its number is" in read(ledger).void
    whole = list(runtime.ledger)
    assert read(whole).void == ""
    assert "its number is" in read([*whole[:2], *whole[3:]]).void
    opened = [msgspec.structs.replace(e, seq=n) for n, e in enumerate(whole[1:], 1)]
    assert "the pool opens first" in read(opened).void


def test_independent_events_are_not_swapped() -> None:
    """A tick and a lock don't depend on each other; two ticks do."""
    tick, lock = Ticked(order=1, now_ms=0), Locked(tenant="a", claim="c", runs=())
    assert not dependent(tick, lock)
    assert dependent(tick, Ticked(order=2, now_ms=0))
    names = [mutant.name for mutant in mutants([tick, lock])]
    assert names == ["without 0 Ticked", "without 0 Locked"]


def test_the_probe_shows_the_papers_boundary() -> None:
    """Below 130 pages one of the two gives way, only hard claims say so; from there both fit."""
    rows = run_sweep(open_micro)
    assert len(rows) == 4 * 7 and not any(row.void for row in rows)
    for row in rows:
        both_fit = row.usable >= 130
        hard = row.policy is SweepPolicy.HARD
        assert row.served is (both_fit or not hard)
        assert row.blocking == (() if row.served else ("a/c",))
        assert row.resident == (60 if both_fit or hard else row.usable - 70)
        assert row.lost == 60 - row.resident
        admitted = row.served and row.policy is not SweepPolicy.WRITE_NO_ADMIT
        assert row.kept == (69 if admitted else 0)


def test_states_are_compared_claim_by_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A book that calls an expired claim released doesn't pass."""
    case = next(case for case in CASES if case.name == "expiry")

    def wrong(*arguments: object) -> object:
        status = original(*arguments)  # type: ignore[arg-type]
        return msgspec.structs.replace(status, state="released")

    original = litmus._status
    monkeypatch.setattr(litmus, "_status", wrong)
    result: CaseResult = run_case(case, open_micro)
    assert not result.states_agree and not result.passed
