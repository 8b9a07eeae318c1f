"""Labels don't grow without end, whatever their values."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from support.metrics_page import value_of

from leyline_proxy.model.vocabulary import CAUSES
from leyline_proxy.telemetry.bounded import (
    CAPS,
    LONGEST_VALUE,
    MOST_VALUES,
    OTHER,
    BoundedCounter,
    BoundedGauge,
    LabelBounds,
    bound,
)
from leyline_proxy.telemetry.metrics import Metrics


def series(metrics: Metrics, name: str) -> dict[str, float]:
    """Values of one metric's series by their labels, in words."""
    return {
        " ".join(sample.labels.values()): sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == name
    }


def test_one_value_too_many_is_other() -> None:
    """The first values keep their series, the rest share one, nothing is lost, and it is
    reported."""
    metrics = Metrics()
    for number in range(MOST_VALUES + 10):
        for _ in range(2):
            metrics.claim_events.labels(f"event{number}").inc()
    found = series(metrics, "leyline_claim_events_total")
    assert len(found) == MOST_VALUES + 1
    assert found[OTHER] == 20
    assert set(found.values()) == {2, 20}
    overflown = series(metrics, "leyline_label_overflow_total")
    assert {label: count for label, count in overflown.items() if count} == {"event": 20}


@pytest.mark.parametrize(("label", "cap"), [(n, c) for n, c in CAPS.items() if c is not None])
def test_some_labels_have_room_for_more(label: str, cap: int) -> None:
    """The names in settings and engines may be many, and are bounded all the same."""
    bounds = LabelBounds()
    found = {bounds.admitted(label, str(number)) for number in range(cap + 5)}
    assert len(found) == cap + 1 and OTHER in found


def test_a_label_is_bounded_over_all_metrics() -> None:
    """A model that has a place in one metric has it in all, so that queries can join them."""
    metrics, most = Metrics(), CAPS["model"] or 0
    for number in range(most + 5):
        metrics.receipts_missing.labels(f"m{number}").inc()
    metrics.freed_tokens.labels("t", "m1").inc()
    metrics.freed_tokens.labels("t", f"m{most + 1}").inc()
    assert series(metrics, "leyline_freed_tokens_total") == {"t m1": 1, f"t {OTHER}": 1}


def test_tenants_and_models_without_end_start_few_series() -> None:
    """Only so many are at 0 before they count; meeting one again costs nothing."""
    metrics = Metrics()
    for _ in range(2):
        for number in range(2000):
            metrics.meet(f"t{number}", "m")
    found = series(metrics, "leyline_cache_busts_total")
    assert len(found) == 1024 * len(CAUSES)
    assert series(metrics, "leyline_receipts_missing_total") == {"m": 0}
    assert not any(series(metrics, "leyline_label_overflow_total").values())


def test_a_value_without_end_is_other() -> None:
    """A name as long as a body makes no series."""
    metrics = Metrics()
    metrics.policy_faults.labels("x" * (LONGEST_VALUE + 1), "timeout").inc()
    assert series(metrics, "leyline_policy_faults_total") == {f"{OTHER} timeout": 1}


@given(st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=200))
def test_no_count_gets_lost(pairs: list[tuple[str, str]]) -> None:
    """The series add up for any values, and there are no more than the caps allow."""
    registry = CollectorRegistry()
    counter = BoundedCounter("c", "C.", ("one", "two"), registry=registry)
    bound(counter, LabelBounds(), removes=True)
    for one, two in pairs:
        counter.labels(one, two).inc()
    found = [
        sample
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "c_total"
    ]
    assert sum(sample.value for sample in found) == len(pairs)
    assert len({sample.labels["one"] for sample in found}) <= MOST_VALUES + 1


def test_removed_series_come_back_empty() -> None:
    """A series that ended begins again, by either way of naming its labels."""
    gauge = BoundedGauge("g", "G.", ("a", "b"), registry=CollectorRegistry())
    bound(gauge, LabelBounds(), removes=True)
    gauge.labels("1", "2").set(5)
    assert value_of(gauge.labels(b="2", a="1")) == 5
    gauge.remove("1", "2")
    gauge.remove("1", "2")
    assert value_of(gauge.labels("1", "2")) == 0


def test_series_that_cannot_end_stand_at_zero() -> None:
    """If other processes read them, an ended one says nothing is there."""
    registry = CollectorRegistry()
    gauge = BoundedGauge("g", "G.", ("a",), registry=registry)
    bound(gauge, LabelBounds(), removes=False)
    gauge.labels("1").set(5)
    gauge.remove("1")
    gauge.remove("2")
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    assert [(sample.labels, sample.value) for sample in samples] == [({"a": "1"}, 0.0)]


def test_wrong_labels_are_refused() -> None:
    """Too few, too many or other names are a mistake in the code, and none is counted."""
    metrics = Metrics()
    for values, named in [((), {}), (("a", "b"), {}), ((), {"label": "a"})]:
        with pytest.raises(ValueError, match="Incorrect label"):
            metrics.upstream_up.labels(*values, **named)
    assert series(metrics, "leyline_upstream_up") == {}


def test_threads_share_series() -> None:
    """Counts of several threads, which plan turns, add up."""
    metrics = Metrics()

    def work() -> None:
        for number in range(500):
            metrics.stage_seconds.labels(f"s{number % 90}").observe(0.1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = series(metrics, "leyline_stage_seconds_count")
    assert sum(found.values()) == 2000
    assert len(found) == MOST_VALUES + 1
