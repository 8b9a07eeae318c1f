"""What a scheduler counts on SGLang's ``/metrics``."""

from __future__ import annotations

from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry

from leyline_engine.contract import ForgetCounts, Outcome, Reason, Receipt, TokenCounts
from leyline_engine.sglang.metrics import NoMetrics, SchedulerMetrics, open_metrics

SPLICED = Receipt(
    message_id="m-1",
    outcome=Outcome.SPLICED,
    reason=Reason.SPLICED,
    tokens=TokenCounts(prompt=100, prefix=40, spliced=50, prefilled=10, freed=7),
    splice_us=2500,
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_a_spliced_request_is_counted(registry: CollectorRegistry) -> None:
    """Outcome, reason, tokens by origin, and the time that the splice took."""
    metrics = SchedulerMetrics(registry)
    metrics.request(SPLICED)
    metrics.request(SPLICED)
    labels = {"outcome": "spliced", "reason": "spliced"}
    assert registry.get_sample_value("leyline_engine_requests_total", labels) == 2
    for kind, tokens in {"prefix": 40, "spliced": 50, "prefilled": 10, "freed": 7}.items():
        found = registry.get_sample_value("leyline_engine_tokens_total", {"kind": kind})
        assert found == 2 * tokens
    assert registry.get_sample_value("leyline_engine_splice_seconds_count") == 2
    assert registry.get_sample_value("leyline_engine_splice_seconds_sum") == pytest.approx(0.005)


def test_only_splices_are_timed(registry: CollectorRegistry) -> None:
    """A request without an edit is counted under no reason, and not timed."""
    metrics = SchedulerMetrics(registry)
    metrics.request(Receipt(message_id="m-2"))
    labels = {"outcome": "unedited", "reason": "none"}
    assert registry.get_sample_value("leyline_engine_requests_total", labels) == 1
    assert registry.get_sample_value("leyline_engine_splice_seconds_count") == 0


def test_a_forget_is_counted_as_it_proceeds(registry: CollectorRegistry) -> None:
    """Each slot counts once in each state it reaches, in however many steps it gets there."""
    metrics = SchedulerMetrics(registry)
    steps = [
        ForgetCounts(),
        ForgetCounts(overwritten=5, shared_retained=2, pending=4),
        ForgetCounts(overwritten=8, shared_retained=2, pending=1),
        ForgetCounts(overwritten=9, shared_retained=2),
    ]
    for before, now in pairwise(steps):
        metrics.forgot(before, now)
    for state, slots in {"overwritten": 9, "shared_retained": 2, "pending": 4}.items():
        found = registry.get_sample_value("leyline_engine_forgotten_slots_total", {"state": state})
        assert found == slots


def test_turns_and_drops(registry: CollectorRegistry) -> None:
    """The retained turns are a level, dropped receipts a count."""
    metrics = SchedulerMetrics(registry)
    metrics.retained(4)
    metrics.retained(3)
    metrics.receipt_dropped()
    assert registry.get_sample_value("leyline_engine_retained_turns") == 3
    assert registry.get_sample_value("leyline_engine_receipts_dropped_total") == 1


@pytest.mark.parametrize(("enabled", "rank"), [(False, 0), (True, 1)])
def test_nothing_is_counted_twice_or_unasked(enabled: bool, rank: int) -> None:
    """Without ``--enable-metrics``, and on ranks that repeat rank 0's work, nothing is defined."""
    assert isinstance(open_metrics(enabled=enabled, attn_tp_rank=rank), NoMetrics)
