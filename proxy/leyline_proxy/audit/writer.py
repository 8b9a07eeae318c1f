"""The thread that writes the log. Records that come too fast, or while the disk fails, are
counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

import msgspec
import structlog

from ..telemetry.logging import frames_of
from ..telemetry.metrics import Metrics
from .chain_file import WriteFailedError
from .files import AuditError
from .records import Record, gap_record

if TYPE_CHECKING:
    from .stream import StreamSink

log = structlog.get_logger("leyline.audit")

Job = Callable[[], Record]
"""Creates a record; runs in the thread, so hashing costs no request anything."""

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Largest number of bytes of texts waiting to be hashed. A single job may be larger."""

_BATCH = 32
"""Jobs between two looks at the clock; running them at once keeps the interpreter busy."""

_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 30.0

_HANGS_S = 10.0
"""Time after which a disk that doesn't answer counts as failed."""


class LogFile(Protocol):
    """The log's file: :class:`~.chain_file.ChainFile`, or the one that workers share."""

    @property
    def path(self) -> Path:
        """Its path, for messages."""

    @property
    def is_open(self) -> bool:
        """True if records can be appended."""

    @property
    def problem(self) -> str | None:
        """The reason that records are lost after :meth:`append`; None if they aren't."""

    @property
    def claims(self) -> Mapping[str, int]:
        """Number of the newest claim event in the log, by run of an engine."""

    def claim(self) -> None:
        """Lock it."""

    def open(self) -> None:
        """Open it."""

    def append(self, records: Sequence[Record]) -> None:
        """Append records."""

    def take_lines(self) -> Sequence[bytes]:
        """Return the lines that were written since the last call."""

    def sync(self) -> None:
        """Flush to the disk."""

    def close(self) -> None:
        """Close it."""


class AuditWriter:
    """Chains records and appends them, in the order of :meth:`offer`.

    Args:
        max_waiting: records that may wait; more are dropped.
        fsync_s: seconds between two flushes to the disk.
    """

    def __init__(
        self,
        file: LogFile,
        metrics: Metrics,
        *,
        max_waiting: int,
        fsync_s: float,
        stream: StreamSink | None = None,
    ) -> None:
        self._file = file
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._fsync_s = fsync_s
        self._stream = stream
        # With a lock of both threads, the event loop would wait for the writer.
        self._waiting: SimpleQueue[tuple[Job, int] | None] = SimpleQueue()
        self._given, self._given_bytes, self._dropped = 0, 0, 0
        """Written by the offering thread; the next ones only by the writer's."""
        self._taken, self._taken_bytes, self._told = 0, 0, 0
        self._lost_on_disk = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        self._retry_at, self._retry_s = 0.0, _FIRST_RETRY_S
        self._fault: str | None = None
        """The disk's last error; None once a flush has worked after it."""
        self._since: float | None = None
        """Time since which the disk has something to do."""

    def claim(self) -> None:
        """Lock the file, before anything is started. Blocks on the disk.

        Raises:
            AuditError: this proxy may not write to the file.
        """
        try:
            self._file.claim()
        except OSError as error:
            log.warning("audit_unavailable", file=str(self._file.path), error=error.strerror)

    def start(self) -> None:
        """Open the file and start the thread. Blocks on the disk.

        Raises:
            AuditError: this proxy may not write to the file.
        """
        self._opened()
        if self._stream is not None:
            self._stream.start()
        # A hanging disk must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="leyline-audit", daemon=True)
        self._thread.start()

    def offer(self, job: Job, weight: int = 0) -> bool:
        """Queue a record; never blocks on the disk and never fails. From one thread only.

        Args:
            weight: approximate bytes that the job keeps alive.

        Returns:
            False if it is dropped, and counted.
        """
        full = self._given - self._taken >= self._max_waiting
        waiting_bytes = self._given_bytes - self._taken_bytes
        heavy = waiting_bytes > 0 and waiting_bytes + weight > MAX_WAITING_BYTES
        if full or heavy or self._closing:
            self.drop()
            return False
        self._given += 1
        self._given_bytes += weight
        self._waiting.put((job, weight))
        return True

    def drop(self) -> None:
        """Count a record that could not be created. From the same thread as :meth:`offer`."""
        self._dropped += 1
        self._metrics.audit_failures.inc()

    @property
    def problem(self) -> str | None:
        """The reason that records are lost now; None if the log is written."""
        if self._fault is not None:
            return f"it can't be written ({self._fault})"
        if not self._file.is_open or self._lost_on_disk:
            return "it can't be written"
        since = self._since
        if since is not None and time.monotonic() - since > _HANGS_S:
            return "its disk doesn't answer"
        if self._dropped > self._told or self._given - self._taken >= self._max_waiting:
            return "too many records wait for the disk"
        return self._file.problem

    def position(self, engine: str) -> int | None:
        """Return the number of the newest claim event in the log, for one run of the engine."""
        return self._file.claims.get(engine)

    def positions(self) -> Mapping[str, int]:
        """Return these numbers for all runs of engines."""
        return dict(self._file.claims)

    def close(self, patience_s: float) -> None:
        """Write the waiting records, and end. Blocks for at most ``patience_s``."""
        self._closing = True
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(patience_s)
            if self._thread.is_alive():
                log.error("audit_not_flushed", waiting=self._given - self._taken)
        if self._stream is not None:
            self._stream.close(patience_s)

    def _run(self) -> None:
        synced = time.monotonic()
        closing = False
        while not closing:
            due = synced + self._fsync_s
            if self._fault is not None:
                due = min(due, self._retry_at)
            jobs, closing = self._take(due - time.monotonic())
            dropped = 0 if self._given > self._taken else self._dropped - self._told
            self._told += dropped
            if closing:
                self._retry_at = 0.0  # the last chance
            self._since = time.monotonic()
            if jobs or dropped or self._lost_on_disk or not self._file.is_open:
                self._write(jobs, dropped)
            if time.monotonic() - synced >= self._fsync_s or closing or self._fault is not None:
                self._sync()
                synced = time.monotonic()
            self._since = None
            self._offer_lines()
        try:
            self._file.close()
        except WriteFailedError as error:
            self._failed(error)
        self._offer_lines()

    def _offer_lines(self) -> None:
        lines = self._file.take_lines()
        if self._stream is not None and lines:
            self._stream.offer(lines)

    def _take(self, wait_s: float) -> tuple[list[Job], bool]:
        """Return the waiting jobs, at most a batch, and True if they are the last."""
        jobs: list[Job] = []
        try:
            while len(jobs) < _BATCH:
                # Wait only for the first.
                item = self._waiting.get(timeout=0 if jobs else max(0.0, wait_s))
                if item is None:
                    return jobs, True
                self._taken += 1
                self._taken_bytes += item[1]
                jobs.append(item[0])
        except Empty:
            pass
        return jobs, False

    def _write(self, jobs: Sequence[Job], dropped: int) -> None:
        records = [record for job in jobs if (record := self._made(job)) is not None]
        if dropped:
            records.append(gap_record(dropped, "queue", time.time()))
        if not self._opened():
            # The gap's own record isn't lost, but those that it counts are.
            self._lose(len(records) - bool(dropped))
            self._lost_on_disk += dropped
            return
        told = self._lost_on_disk
        if told:
            records.insert(0, gap_record(told, "disk", time.time()))
        try:
            self._file.append(records)
        except WriteFailedError as error:
            self._cut_short(error, len(records), told, dropped)
            return
        self._lost_on_disk -= told

    def _cut_short(self, error: WriteFailedError, count: int, told: int, dropped: int) -> None:
        """Count the losses of an incomplete write; records of gaps aren't losses themselves.

        Args:
            told: losses that the first record counts; 0 if it is another.
            dropped: records that the last one counts; 0 if it is another.
        """
        lost = error.lost
        if told and lost == count:
            lost -= 1
        elif told:
            self._lost_on_disk -= told
        if dropped and error.lost:
            lost -= 1
            self._lost_on_disk += dropped  # the metric has them
        self._failed(WriteFailedError(lost, error.why))

    def _made(self, job: Job) -> Record | None:
        try:
            record = job()
            msgspec.json.encode(record)  # unencodable records must not reach the chain
            return record
        except Exception as error:  # a fault in here must not end the log
            log.error("audit_record_failed", error=type(error).__name__, frames=frames_of(error))
            self._lose(1)
            return None

    def _opened(self) -> bool:
        """Return True if the file is open, after another try if one is due."""
        if self._file.is_open:
            return True
        if time.monotonic() < self._retry_at:
            return False
        try:
            self._file.open()
        except WriteFailedError as error:
            self._failed(error)
        except AuditError as error:
            if self._thread is None:
                raise
            log.error("audit_refused", error=str(error))
            self._failed(WriteFailedError(0, "it is another proxy's, or no log"))
        return self._file.is_open

    def _sync(self) -> None:
        """Flush; only that shows that the disk works again after a failure."""
        try:
            self._file.sync()
        except WriteFailedError as error:
            self._failed(error)
            return
        if self._fault is not None and self._file.is_open:
            log.info("audit_writes_again", file=str(self._file.path))
            self._fault, self._retry_s = None, _FIRST_RETRY_S

    def _failed(self, error: WriteFailedError) -> None:
        if self._fault is None:
            log.error("audit_failed", file=str(self._file.path), error=error.why)
        self._fault = error.why
        self._lose(error.lost)
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(_LAST_RETRY_S, 2 * self._retry_s)

    def _lose(self, count: int) -> None:
        self._lost_on_disk += count
        self._metrics.audit_failures.inc(count)
