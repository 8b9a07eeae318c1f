"""The records and counts of requests on the replay engine's thread, and the times of readings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from leyline_engine.contract import ForgetCounts, Outcome, Proof, TurnRecord
from leyline_engine.metrics import EngineMetrics
from leyline_engine.records.turn_records import RecordBook
from leyline_replay.generation import JobSpec

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two readings of a busy engine."""


class Filing:
    """Files records, before their readers can ask for them, and counts them.

    Args:
        records: by message, for the side channel.
        metrics: counts each request once, and its forget's progress.
    """

    def __init__(self, records: RecordBook, metrics: EngineMetrics) -> None:
        self.records = records
        self._metrics = metrics
        self._forgetting: dict[str, ForgetCounts] = {}

    def began(self, spec: JobSpec, record: TurnRecord) -> None:
        """Record that a request was admitted."""
        self._forgot_first(spec, record)
        self.records.put(_with_fault(spec, record), spec.scope)

    def ended(self, spec: JobSpec, record: TurnRecord) -> TurnRecord:
        """Record that a request ended; returns its record as filed."""
        record = _with_fault(spec, record)
        if spec.enveloped:
            self._metrics.request(record.receipt)
        return self.records.put(record, spec.scope)

    def refused(self, spec: JobSpec, record: TurnRecord, *, began: bool = False) -> None:
        """Record that a request ended because of claims.

        Args:
            began: True if it was admitted.
        """
        if not began:
            self._forgot_first(spec, record)
        self._metrics.refused()
        self.ended(spec, record)

    def progressed(
        self, forgets: Mapping[str, ForgetCounts], proofs: Mapping[str, Proof] | None = None
    ) -> None:
        """Record forgets, by message, of which more was overwritten since they were filed.

        Args:
            proofs: those that changed since they were filed.
        """
        for message_id, counts in forgets.items():
            self.records.update_forgot(message_id, counts)
            self._forgot(message_id, counts)
        for message_id, proof in (proofs or {}).items():
            self.records.prove(message_id, proof)

    def _forgot_first(self, spec: JobSpec, record: TurnRecord) -> None:
        if record.receipt.forgot is not None:
            self.records.strip(spec.scope, record.receipt.session)
            self._forgot(record.receipt.message_id, record.receipt.forgot)

    def _forgot(self, message_id: str, counts: ForgetCounts) -> None:
        self._metrics.forgot(self._forgetting.pop(message_id, ForgetCounts()), counts)
        if counts.pending:
            self._forgetting[message_id] = counts


def _with_fault(spec: JobSpec, record: TurnRecord) -> TurnRecord:
    """Return a record that reports it if the request's hints were malformed."""
    if spec.invalid is None:
        return record
    receipt = msgspec.structs.replace(
        record.receipt,
        outcome=Outcome.REPREFILLED,
        reason=spec.invalid,
        detail=spec.invalid_detail,
    )
    return msgspec.structs.replace(record, receipt=receipt)


class Readings:
    """Reads levels once a second while the engine is busy, and when it falls idle.

    Args:
        read: reads them; None if they aren't needed.
        now_s: a clock that never goes back.
    """

    def __init__(
        self, read: Callable[[], None] | None, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._now_s = now_s
        self._due_s = 0.0

    def stepped(self) -> None:
        """Note that the engine has done a round of work."""
        if self._read is not None and self._now_s() >= self._due_s:
            self.fell_idle()

    def fell_idle(self) -> None:
        """Note that there is nothing left to do."""
        if self._read is None:
            return
        self._due_s = self._now_s() + EVERY_S
        try:
            self._read()
        except Exception:
            log.exception("levels could not be read; requests go on")
