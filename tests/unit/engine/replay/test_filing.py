"""The replay engine's thread files and counts, and reads levels at their time."""

from __future__ import annotations

from array import array

import pytest
from prometheus_client import CollectorRegistry

from leyline_engine.contract import ForgetCounts, Outcome, Reason, Receipt, TurnRecord
from leyline_engine.metrics import PrometheusMetrics
from leyline_engine.records.turn_records import RecordBook
from leyline_replay.engine import GenerationRequest
from leyline_replay.generation import JobSpec
from leyline_replay.metrics import Filing, Readings


class Desk:
    """A filing over a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.records = RecordBook()
        self.filing = Filing(self.records, PrometheusMetrics(self.registry))

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"leyline_engine_{name}_total", labels)

    def slots(self) -> dict[str, float | None]:
        states = ("overwritten", "shared_retained", "pending")
        return {state: self.value("forgotten_slots", state=state) for state in states}


@pytest.fixture
def desk() -> Desk:
    return Desk()


def spec(*, enveloped: bool = True, invalid: Reason | None = None) -> JobSpec:
    request = GenerationRequest("m", array("q", [1]))
    return JobSpec(request, enveloped=enveloped, invalid=invalid, invalid_detail="malformed")


def record(*, finished: bool, forgot: ForgetCounts | None = None) -> TurnRecord:
    return TurnRecord(receipt=Receipt(message_id="m", forgot=forgot), finished=finished)


def test_a_request_counts_once_when_it_ends(desk: Desk) -> None:
    """It doesn't count when it begins, and counts only with an envelope."""
    labels = {"outcome": "unedited", "reason": "none"}
    desk.filing.began(spec(), record(finished=False))
    assert desk.value("requests", **labels) is None
    desk.filing.ended(spec(), record(finished=True))
    desk.filing.ended(spec(enveloped=False), record(finished=True))
    assert desk.value("requests", **labels) == 1
    filed = desk.records.get("m")
    assert filed is not None and filed.finished


def test_a_malformed_envelope_is_counted_under_its_fault(desk: Desk) -> None:
    """The record that is filed and returned says the same."""
    filed = desk.filing.ended(spec(invalid=Reason.INVALID_EDIT), record(finished=True))
    assert (filed.receipt.outcome, filed.receipt.detail) == (Outcome.REPREFILLED, "malformed")
    assert desk.value("requests", outcome="reprefilled", reason="invalid_edit") == 1


def test_a_forget_counts_as_it_proceeds(desk: Desk) -> None:
    """Its request's last record repeats what the first said, and counts nothing again."""
    forgot = ForgetCounts(overwritten=5, shared_retained=2, pending=4)
    desk.filing.began(spec(), record(finished=False, forgot=forgot))
    desk.filing.ended(spec(), record(finished=True, forgot=forgot))
    desk.filing.progressed({"m": ForgetCounts(overwritten=8, shared_retained=2, pending=1)})
    desk.filing.progressed({"m": ForgetCounts(overwritten=9, shared_retained=2)})
    assert desk.slots() == {"overwritten": 9, "shared_retained": 2, "pending": 4}
    assert not desk.filing._forgetting


@pytest.mark.parametrize("began", [False, True])
def test_a_refused_request_counts_its_forget_once(desk: Desk, began: bool) -> None:
    """It counts once if it was refused before it ran, or while it did."""
    forgot = ForgetCounts(overwritten=3)
    if began:
        desk.filing.began(spec(), record(finished=False, forgot=forgot))
    desk.filing.refused(spec(), record(finished=True, forgot=forgot), began=began)
    assert desk.slots()["overwritten"] == 3
    assert desk.value("refusals") == 1


def test_levels_are_read_once_a_second_and_when_the_engine_falls_idle() -> None:
    """They aren't read at each step."""
    clock, read = [5.0], []
    readings = Readings(lambda: read.append(clock[0]), now_s=lambda: clock[0])
    for _ in range(20):
        readings.stepped()
    clock[0] = 6.0
    readings.stepped()
    readings.fell_idle()
    readings.stepped()
    assert read == [5.0, 6.0, 6.0]


def test_a_reading_that_fails_stops_no_engine(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and tried again a second later."""
    clock = [5.0]

    def read() -> None:
        raise RuntimeError("out of order")

    readings = Readings(read, now_s=lambda: clock[0])
    readings.stepped()
    readings.stepped()
    assert len(caplog.records) == 1
    clock[0] = 6.0
    readings.stepped()
    assert len(caplog.records) == 2
