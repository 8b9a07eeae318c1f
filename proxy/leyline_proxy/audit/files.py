"""The files of a log: the current one, earlier ones, the head and the lock.

``NAME`` is being written, ``NAME.000001`` and so on are earlier files, ``NAME.head`` holds the
number and hash of the newest record, and the writer locks ``NAME.lock``.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from .chain import Head, read_line
from .check import MAX_TORN, number_before

MODE = 0o600

MAX_RUNS = 16
"""Number of engine runs whose newest claim event is remembered."""


class AuditError(ValueError):
    """The log can't be written; the operator must act."""


class AuditLockedError(AuditError):
    """Another process writes to the file."""


class SavedHead(msgspec.Struct, frozen=True):
    """The content of ``NAME.head``."""

    seq: int
    hash: str


class _Record(msgspec.Struct, frozen=True):
    """The members of a record that a start needs."""

    seq: int
    hash: str
    kind: str
    engine: str | None = None
    event: dict[str, object] | None = None
    claims: dict[str, int] | None = None
    oldest: int | None = None
    before: dict[str, object] | None = None


@dataclass(slots=True)
class Found:
    """The content of a file when it is opened."""

    head: Head = field(default_factory=Head)
    records: int = 0
    torn: tuple[bytes, ...] = ()
    ends_line: bool = True
    """True if the last byte is a newline."""
    size: int = 0
    claims: dict[str, int] = field(default_factory=dict)
    oldest: int = 1
    """Number of the oldest file kept, by the log's own account."""
    newest: int = 0
    """Number of the newest earlier file, by the log's own account; 0 for none."""


def beside(path: Path, suffix: str) -> Path:
    """Return a file next to the log's."""
    return path.with_name(path.name + suffix)


def rotated(path: Path) -> dict[int, Path]:
    """Return the earlier files of a log by number, oldest first."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d{6,})")
    found: dict[int, Path] = {}
    for entry in path.parent.iterdir() if path.parent.is_dir() else ():
        match = pattern.fullmatch(entry.name)
        if match is not None:
            found[int(match.group(1))] = entry
    return dict(sorted(found.items()))


def lock(path: Path) -> int:
    """Return the descriptor of the lock, which is held until it is closed.

    Raises:
        AuditLockedError: another process, or another log in this one, holds it.
        OSError: it can't be created.
    """
    descriptor = os.open(beside(path, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise AuditLockedError(
            f"{path} is written by another proxy; give each its own file, for example with "
            "{instance} in its name"
        ) from error
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def survey(path: Path) -> Found:
    """Return the content of a file; for a missing one, the log's earlier content.

    Raises:
        AuditError: the file isn't an audit log.
        OSError: it can't be read.
    """
    before = Found()
    data = path.read_bytes() if path.exists() else b""
    earlier = rotated(path)
    if earlier and not _has_record(data):
        number, newest = next(reversed(earlier.items()))
        before = _scan(newest.read_bytes(), Found())
        before.torn, before.records, before.newest = (), 0, max(before.newest, number)
    found = _scan(data, before)
    if found.records == 0 and data and not _may_be_torn(data):
        raise AuditError(f"{path} is no audit log of this version; move it away")
    found.size, found.ends_line = len(data), data.endswith(b"\n") or not data
    return found


def _has_record(data: bytes) -> bool:
    return any(read_line(line) is not None for line in data.split(b"\n"))


def _scan(data: bytes, found: Found) -> Found:
    decoder = msgspec.json.Decoder(_Record)
    torn: list[bytes] = []
    for line in data.split(b"\n"):
        if read_line(line) is None:
            torn.append(line)
            continue
        torn = []
        record = decoder.decode(line)
        found.head = Head(record.seq, record.hash)
        found.records += 1
        if record.claims is not None:
            found.claims = dict(record.claims)
        if record.kind == "rotate":
            found.oldest = record.oldest or found.oldest
            found.newest = number_before(record.before)
        number = (record.event or {}).get("seq")
        if record.kind == "claim" and record.engine is not None and isinstance(number, int):
            note_claim(found.claims, record.engine, number)
    pieces = torn[:-1] if torn and not torn[-1] else torn
    found.torn = tuple(pieces[-MAX_TORN:])
    return found


def _may_be_torn(data: bytes) -> bool:
    """Return True if a file without a whole record may be the beginning of a log."""
    start = b'{"seq":'
    return all(part[: len(start)] == start[: len(part)] for part in data.split(b"\n"))


def note_claim(claims: dict[str, int], engine: str, number: int) -> None:
    """Record the newest claim event of an engine's run, for the newest runs."""
    claims.pop(engine, None)
    claims[engine] = number
    while len(claims) > MAX_RUNS:
        del claims[next(iter(claims))]


def read_head(path: Path) -> SavedHead | None:
    """Return the saved head of a log."""
    try:
        return msgspec.json.decode(beside(path, ".head").read_bytes(), type=SavedHead)
    except (OSError, msgspec.DecodeError):
        return None


def save_head(path: Path, head: Head) -> None:
    """Replace the saved head. The log's own bytes must be on the disk before.

    Raises:
        OSError: the disk failed.
    """
    draft = beside(path, ".head.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(SavedHead(head.seq, head.hash)) + b"\n")
    draft.replace(beside(path, ".head"))


def sync_folder(path: Path) -> None:
    """Flush the names of the log's files to the disk.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def missing_tail(path: Path, found: Found, synced: Head) -> Mapping[str, object] | None:
    """Return the last known head of a log that ends before it.

    Args:
        synced: the head that this process has flushed to the disk.
    """
    saved = read_head(path)
    last = synced if saved is None or saved.seq < synced.seq else Head(saved.seq, saved.hash)
    if last.seq <= found.head.seq:
        return None
    return {"seq": last.seq, "hash": last.hash}
