"""The counts of an engine, as series: catalogue, receipts, forgets, owners of slots."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric

from leyline_engine.claims.events import Run
from leyline_engine.claims.runs import pages_of
from leyline_engine.contract import ForgetCounts, Outcome, Reason, Receipt, TokenCounts
from leyline_engine.contract.metrics import ENGINE_METRICS, POOL_OWNERS
from leyline_engine.metrics import PrometheusMetrics
from leyline_engine.occupancy import Cached, PoolLevels, RegistryLevels, held_by_claims
from leyline_engine.records.sources import SourceRegistry, SourceTurn

SPLICED = Receipt(
    message_id="m-1",
    outcome=Outcome.SPLICED,
    reason=Reason.SPLICED,
    tokens=TokenCounts(prompt=100, prefix=40, spliced=50, prefilled=10, freed=7),
    splice_us=2500,
)
LEVELS = PoolLevels(100, free=20, cached=Cached(40, 30), claimed=Cached(5, 2), peak=90)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"leyline_engine_{name}", labels)


def test_the_series_are_those_of_the_catalogue(registry: CollectorRegistry) -> None:
    """Name, kind, help and labels of each; a renamed one fails here."""
    metrics = PrometheusMetrics(registry)
    metrics.request(SPLICED)
    metrics.forgot(ForgetCounts(), ForgetCounts(pending=1))
    metrics.pool(LEVELS)
    found: dict[str, Metric] = {metric.name: metric for metric in registry.collect()}
    assert found.keys() == {spec.name for spec in ENGINE_METRICS}
    for spec in ENGINE_METRICS:
        metric = found[spec.name]
        assert (metric.type, metric.documentation) == (spec.kind, spec.help)
        assert {frozenset(s.labels) - {"le"} for s in metric.samples} == {frozenset(spec.labels)}


def test_a_spliced_request_is_counted(registry: CollectorRegistry) -> None:
    """Outcome, reason, tokens by origin, and the time that the splice took."""
    metrics = PrometheusMetrics(registry)
    metrics.request(SPLICED)
    metrics.request(SPLICED)
    assert value(registry, "requests_total", outcome="spliced", reason="spliced") == 2
    for kind, tokens in {"prefix": 40, "spliced": 50, "prefilled": 10, "freed": 7}.items():
        assert value(registry, "tokens_total", kind=kind) == 2 * tokens
    assert value(registry, "splice_seconds_count") == 2
    assert value(registry, "splice_seconds_sum") == pytest.approx(0.005)


def test_only_splices_are_timed(registry: CollectorRegistry) -> None:
    """A request without an edit is counted under no reason, and not timed."""
    PrometheusMetrics(registry).request(Receipt(message_id="m-2"))
    assert value(registry, "requests_total", outcome="unedited", reason="none") == 1
    assert value(registry, "splice_seconds_count") == 0


def test_a_forget_is_counted_as_it_proceeds(registry: CollectorRegistry) -> None:
    """Each slot counts once in each state it reaches, in however many steps it gets there."""
    metrics = PrometheusMetrics(registry)
    steps = [
        ForgetCounts(),
        ForgetCounts(overwritten=5, shared_retained=2, pending=4),
        ForgetCounts(overwritten=8, shared_retained=2, pending=1),
        ForgetCounts(overwritten=9, shared_retained=2),
    ]
    for before, now in pairwise(steps):
        metrics.forgot(before, now)
    for state, slots in {"overwritten": 9, "shared_retained": 2, "pending": 4}.items():
        assert value(registry, "forgotten_slots_total", state=state) == slots


def test_levels_and_events(registry: CollectorRegistry) -> None:
    """Slots have one owner each, claims before the tree; what happened only grows."""
    metrics = PrometheusMetrics(registry)
    metrics.pool(LEVELS)
    metrics.registries(RegistryLevels(turns=4, tokens=900, spans=12, lineages=3))
    for _ in range(2):
        metrics.copied(512)
        metrics.evicted(64)
        metrics.refused()
        metrics.receipt_dropped()
        metrics.energy(1.5)
        metrics.request_energy(0.5)
    owners = {owner: value(registry, "pool_tokens", owner=owner) for owner in POOL_OWNERS}
    assert owners == {"exact": 35, "spliced": 28, "claimed": 7, "in_flight": 10, "free": 20}
    assert sum(filter(None, owners.values())) == value(registry, "pool_capacity_tokens") == 100
    assert value(registry, "pool_peak_tokens") == 90
    for name, level in {
        "retained_turns": 4,
        "retained_tokens": 900,
        "ledger_spans": 12,
        "lineages": 3,
        "splice_bytes_total": 1024,
        "evicted_tokens_total": 128,
        "refusals_total": 2,
        "receipts_dropped_total": 2,
        "energy_joules_total": 3.0,
        "request_energy_joules_count": 2,
    }.items():
        assert value(registry, name) == level, name


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("request", (SPLICED,)),
        ("forgot", (ForgetCounts(), ForgetCounts(overwritten=1))),
        ("refused", ()),
        ("copied", (-1,)),
        ("evicted", (-1,)),
        ("receipt_dropped", ()),
        ("pool", (LEVELS,)),
        ("registries", (RegistryLevels(),)),
        ("energy", (-1.0,)),
        ("request_energy", (1.0,)),
    ],
)
def test_what_cannot_be_counted_fails_nothing(
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    told: tuple[object, ...],
) -> None:
    """A full disk under SGLang's series, for example, is logged, and no caller learns of it."""
    metrics = PrometheusMetrics(registry)

    def full(name: str) -> object:
        raise OSError("no space left")

    monkeypatch.setattr(metrics, "_of", full)
    getattr(metrics, method)(*told)
    assert [record.getMessage() for record in caplog.records] == [
        f"{method} could not be counted; requests go on"
    ]


def _run(source: str, start: int, length: int) -> Run:
    return Run(source, start, start + length)


RUNS = st.builds(_run, st.sampled_from("ab"), st.integers(0, 20), st.integers(1, 12))
FIRST = {"a": 9, "b": 14}
"""The position where each source's paths begin to be spliced; of one path, all claims agree."""


@given(st.lists(st.lists(RUNS, max_size=4), max_size=5), st.sampled_from([1, 16]))
def test_pages_that_several_claims_hold_count_once(claims: list[list[Run]], size: int) -> None:
    """The result is as if every page were counted by itself, in tokens."""
    holds = [(FIRST[run.source] * size, [run]) for runs in claims for run in runs]
    pages = {page for runs in claims for page in pages_of(runs)}
    exact = sum(at < FIRST[source] for source, at in pages)
    assert held_by_claims(holds, size) == Cached(exact * size, (len(pages) - exact) * size)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 9)), max_size=40))
def test_tokens_of_retained_turns_are_counted_as_they_come_and_go(
    steps: list[tuple[int, int, int]],
) -> None:
    """The counts hold for turns retained, named again, dropped for room, forgotten or cleared."""
    registry = SourceRegistry(max_sessions=3, max_turns=3)
    for session, turn, length in steps:
        key = ("tenant", f"s{session}")
        if length == 0:
            registry.drop(key, f"t{turn}")
        elif length == 9 and turn == 5:
            registry.clear()
        else:
            tokens = array("q", range(length))
            registry.retain(key, SourceTurn(f"t{turn}", tokens, "", (), *key))
        turns = [turn for n in range(5) for turn in registry.turns(("tenant", f"s{n}"))]
        assert registry.token_count == sum(len(turn.tokens) for turn in turns)
        assert registry.count() == len(turns)
