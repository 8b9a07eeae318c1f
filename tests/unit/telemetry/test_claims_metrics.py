"""The series of claims are few and end with them."""

from __future__ import annotations

from leyline_engine.contract import Claim, ClaimKind, ClaimState, ClaimStatus, Predicate
from leyline_proxy.telemetry.claim_metrics import MAX_SERIES, ClaimMetrics
from leyline_proxy.telemetry.metrics import Metrics


def status(
    name: str, tenant: str = "red", state: ClaimState = ClaimState.MATERIALIZED
) -> ClaimStatus:
    """A live claim."""
    claim = Claim(
        id=name, tenant=tenant, session="s", kind=ClaimKind.SOFT, predicate=Predicate("t", 0, 4)
    )
    return ClaimStatus(claim=claim, state=state, required_tokens=4)


def series(metrics: Metrics, name: str) -> list[dict[str, str]]:
    """Labels of the series of one metric."""
    return [
        sample.labels
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == name
    ]


def test_more_claims_than_series_are_in_the_sums_alone() -> None:
    """A claim that has series keeps them, whatever comes; when it ends, the next one gets them."""
    metrics = Metrics()
    shown = ClaimMetrics(metrics, {"red"})
    every = [status(f"c{number}") for number in range(MAX_SERIES + 2)]
    shown.publish("engine", every[1:])
    shown.publish("engine", every)
    names = {labels["claim"] for labels in series(metrics, "leyline_claim_hits")}
    assert len(names) == MAX_SERIES and "c0" not in names
    assert metrics.registry.get_sample_value(
        "leyline_claims", {"tenant": "red", "kind": "soft"}
    ) == len(every)
    shown.publish("engine", [every[0], *every[2:]])
    names = {labels["claim"] for labels in series(metrics, "leyline_claim_hits")}
    assert len(names) == MAX_SERIES and "c0" in names and "c1" not in names
    shown.publish("engine", [])
    assert not any(
        series(metrics, f"leyline_claim_{name}")
        for name in ("state", "resident_tokens", "hits", "age_seconds", "pressure")
    )


def test_a_claim_is_in_one_state() -> None:
    """The series of the state before goes."""
    metrics = Metrics()
    shown = ClaimMetrics(metrics, {"red"})
    shown.publish("engine", [status("c", state=ClaimState.ACCEPTED)])
    shown.publish("engine", [status("c")])
    assert [labels["state"] for labels in series(metrics, "leyline_claim_state")] == [
        "materialized"
    ]


def test_tenants_of_another_proxy_share_a_label() -> None:
    """Their names are none that this one was configured with."""
    metrics = Metrics()
    shown = ClaimMetrics(metrics, {"red"})
    shown.publish("engine", [status("c", "blue"), status("d", "green")])
    assert {labels["tenant"] for labels in series(metrics, "leyline_claims")} == {"other"}
    assert len(series(metrics, "leyline_claim_hits")) == 2


def test_events_are_counted_by_kind() -> None:
    """Those of no claim are counted, too."""
    metrics = Metrics()
    ClaimMetrics(metrics, ()).count([{"event": "locked"}, {"event": "ticked"}, {"event": "locked"}])
    value = metrics.registry.get_sample_value("leyline_claim_events_total", {"event": "locked"})
    assert value == 2
