"""Recalls of a turn as metrics: series, tokens, and which turns are looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from eviction_talks import Talk
from support.metrics_page import value_of

from leyline_proxy.model.session import Session
from leyline_proxy.model.working_set import PieceCause, PieceReport, PieceVerdict
from leyline_proxy.observe.eviction_rates import EvictionRates, Work
from leyline_proxy.observe.turn_metrics import RecallMetrics
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.turns.recall_reports import RecallOutcome
from leyline_proxy.turns.settled import SettledTurn

OWNER = ("red", "s")


class Rates(EvictionRates):
    """Rates that only remember what they are given."""

    def __init__(self) -> None:
        super().__init__(Metrics())
        self.added: list[Work] = []
        self.dropped: list[tuple[tuple[str, str], int]] = []

    def add(self, work: Work) -> None:
        """Remember it."""
        self.added.append(work)

    def forgotten(self, owner: tuple[str, str], demands: int) -> None:
        """Remember it."""
        self.dropped.append((owner, demands))


def report(verdict: PieceVerdict, cause: PieceCause | None = None) -> PieceReport:
    """A report on a text of 100 tokens, a tenth of which was prefilled."""
    return PieceReport(
        selector="calls[0]",
        verdict=verdict,
        cause=cause,
        address="sha256:" + "a" * 32,
        tokens=100,
        price_tokens=10,
    )


def settled(
    *outcomes: RecallOutcome, recall: bool = True, forgets: bool = False, demands: int = 0
) -> SettledTurn:
    """A turn with these recalls; only what the metrics read."""
    turn = SimpleNamespace(
        request=SimpleNamespace(tenant=SimpleNamespace(name="red", recall=recall)),
        identity=SimpleNamespace(session_id="s"),
        planned=SimpleNamespace(prepared=Talk().turn(), plan=SimpleNamespace(forgets=forgets)),
        index=0,
        demands=demands,
    )
    return cast(SettledTurn, SimpleNamespace(turn=turn, recalled=outcomes))


def session(demands: int = 0) -> Session:
    """A session after so many demands."""
    return Session("s", "red", "named", (), (), 1, 0.0, demands=demands)


def samples(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Samples other than 0, by the values of their labels."""
    found: dict[tuple[str, ...], float] = {}
    for family in cast(Any, getattr(metrics, name)).collect():
        found |= {tuple(each.labels.values()): each.value for each in family.samples if each.value}
    return found


def test_tokens_are_those_that_were_put_back() -> None:
    """Each outcome counts once under its way, verdict and cause; only texts that were put back
    have tokens, and only those in prompts have prefilled ones."""
    metrics, rates = Metrics(), Rates()
    counts = RecallMetrics(metrics, rates)
    refused = report(PieceVerdict.REFUSE, PieceCause.FORGOTTEN)
    outcomes = [
        RecallOutcome("tool", report(PieceVerdict.HIT)),
        RecallOutcome("context", report(PieceVerdict.RECOMPUTE)),
        RecallOutcome("reference", refused),
    ]
    counts.settled(settled(*outcomes), session())
    counts.asked(OWNER, [report(PieceVerdict.FAULT), refused])
    assert samples(metrics, "recalls") == {
        ("red", "tool", "hit", "none"): 1,
        ("red", "context", "recompute", "none"): 1,
        ("red", "reference", "refuse", "forgotten"): 1,
        ("red", "api", "fault", "none"): 1,
        ("red", "api", "refuse", "forgotten"): 1,
    }
    assert samples(metrics, "recall_tokens") == {
        ("red", "tool", "hit"): 100,
        ("red", "context", "recompute"): 100,
        ("red", "api", "fault"): 100,
    }
    assert samples(metrics, "recall_prefilled_tokens") == {
        ("red", "tool"): 10,
        ("red", "context"): 10,
    }
    assert [(work.owner, work.first) for work in rates.added] == [(OWNER, True), (OWNER, False)]


def test_series_begin_at_zero() -> None:
    """A tenant with recall has the series of what can be put back before anything is, and a tenant
    without has none, and nothing of it is looked at."""
    metrics, rates = Metrics(), Rates()
    counts = RecallMetrics(metrics, rates)
    counts.settled(settled(recall=False), session())
    (before,) = metrics.recalls.collect()
    assert not before.samples and not rates.added
    counts.settled(settled(), session())
    (after,) = metrics.recalls.collect()
    begun = {tuple(each.labels.values()) for each in after.samples}
    assert ("red", "tool", "hit", "none") in begun and ("red", "api", "fault", "none") in begun
    assert value_of(metrics.recalls) == 0 and len(rates.added) == 1


@pytest.mark.parametrize(("forgets", "demands"), [(True, 1), (False, 1), (False, 0)])
def test_a_turn_that_a_forget_reaches_is_not_looked_at(forgets: bool, demands: int) -> None:
    """The texts of a turn that forgets, and of one that was planned before a forget, are dropped;
    those of others are looked at."""
    rates = Rates()
    RecallMetrics(Metrics(), rates).settled(settled(forgets=forgets), session(demands))
    reached = forgets or demands > 0
    assert rates.dropped == ([(OWNER, demands)] if reached else [])
    assert len(rates.added) == (not reached)
