"""Records and logs to test with."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from leyline_proxy.audit.chain import AuditKey, Head, seal
from leyline_proxy.audit.chain_file import ChainFile
from leyline_proxy.audit.check import AuditFinding, Checked, broken_at_end, check_file
from leyline_proxy.audit.records import Record, claim_record, start_record
from leyline_proxy.audit.writer import AuditWriter
from leyline_proxy.telemetry.metrics import Metrics

AT = 1_780_000_000.0
KEY = AuditKey.derive("a key for tests")


def event(number: int, engine: str = "run-1") -> Record:
    """One small record."""
    return claim_record(engine, {"event": "accepted", "seq": number, "claim": f"c{number}"}, AT)


def lines_of_log(count: int, key: AuditKey | None = None) -> tuple[list[bytes], Head]:
    """The lines of a log with a start and so many records after it, and its head."""
    records = [start_record("here", "1", key, AT, None), *map(event, range(1, count + 1))]
    head, lines = Head(), []
    for record in records:
        line, head = seal(head, record, key)
        lines.append(line)
    return lines, head


def judged(
    data: bytes, key: AuditKey | None = None, head: str | None = None
) -> AuditFinding | None:
    """Return the faults of a log in one file."""
    checked = Checked(wanted={head} if head else set())
    check_file(data, checked, [key] if key else [])
    return checked.finding or broken_at_end(checked)


def chain_file(path: Path, **options: object) -> ChainFile:
    """A log's file with the settings that tests want."""
    settings = {"key": None, "instance": "here", "version": "1", "max_bytes": 1 << 20, "keep": 0}
    return ChainFile(path, **{**settings, **options})  # type: ignore[arg-type]


def counters() -> Metrics:
    """Metrics that no other test counts in."""
    return Metrics(CollectorRegistry())


def writer(
    path: Path,
    *,
    metrics: Metrics | None = None,
    max_waiting: int = 4096,
    fsync_s: float = 0.05,
    **options: object,
) -> AuditWriter:
    """A writer that isn't started yet."""
    file = chain_file(path, **options)
    return AuditWriter(file, metrics or counters(), max_waiting=max_waiting, fsync_s=fsync_s)
