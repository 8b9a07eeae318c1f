"""Appends to a log, file after file. Every method may block on the disk."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from .chain import AuditKey, Head, seal
from .files import (
    MODE,
    AuditError,
    Found,
    beside,
    lock,
    missing_tail,
    note_claim,
    rotated,
    save_head,
    survey,
    sync_folder,
)
from .records import Record, recovered_record, rotate_record, start_record, stop_record

log = structlog.get_logger("leyline.audit")


class WriteFailedError(Exception):
    """Records could not be written; ``lost`` of them are gone."""

    def __init__(self, lost: int, why: str) -> None:
        super().__init__(why)
        self.lost = lost
        self.why = why


class ChainFile:
    """One log, written only by this process.

    Args:
        max_bytes: of one file; the record that reaches it is the file's last.
        keep: number of earlier files to keep; 0 for all.
    """

    def __init__(
        self,
        path: Path,
        *,
        key: AuditKey | None,
        instance: str,
        version: str,
        max_bytes: int,
        keep: int,
    ) -> None:
        self.path = path
        self.key = key
        self.claims: dict[str, int] = {}
        """Number of the newest claim event in the log, by run of the engine."""
        self._instance = instance
        self._version = version
        self._max_bytes = max_bytes
        self._keep = keep
        self._lock: int | None = None
        self._descriptor: int | None = None
        self._head = Head()
        self._synced = Head()
        """The newest record that is known to be on the disk."""
        self._oldest, self._newest = 1, 0
        """Numbers of earlier files by the log's own account, whatever the folder has."""
        self._lines: list[bytes] = []
        self._size = 0
        self._dirty = False
        self._started = False

    @property
    def head(self) -> Head:
        """The newest record."""
        return self._head

    problem = None
    """Nothing is lost after :meth:`append`."""

    @property
    def is_open(self) -> bool:
        """True if records can be appended."""
        return self._descriptor is not None

    def claim(self) -> None:
        """Lock the file and check that it is a log, to report a mistake before the start.

        Raises:
            AuditError: another process has it, or it isn't a log.
            OSError: the disk failed; :meth:`open` tries again.
        """
        if self._lock is None:
            self._lock = lock(self.path)
        try:
            survey(self.path)
        except AuditError:
            self._unlock()
            raise

    def open(self) -> None:
        """Take the file over and continue at its end.

        Raises:
            AuditError: another process has it, or it isn't a log.
            WriteFailedError: the disk failed.
        """
        try:
            if self._lock is None:
                self._lock = lock(self.path)
            found = survey(self.path)
            self._descriptor = os.open(
                self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE
            )
        except OSError as error:
            raise WriteFailedError(0, error.strerror or str(error)) from error
        except AuditError:
            self._unlock()
            raise
        self._head, self._size, self.claims = found.head, found.size, found.claims
        self._oldest, self._newest = found.oldest, found.newest
        try:
            self._resume(found)
        except WriteFailedError as error:
            # The next start creates the records of this one again.
            raise WriteFailedError(0, error.why) from error

    def _resume(self, found: Found) -> None:
        records: list[Record] = []
        missing = missing_tail(self.path, found, self._synced)
        if not found.ends_line:
            self._write(b"\n", 0)
        if found.torn:
            pieces = sum(map(len, found.torn))
            log.warning("audit_recovered", file=str(self.path), torn_bytes=pieces)
            records.append(recovered_record(found.torn, opens=found.records == 0, at=time.time()))
        elif found.records == 0 and found.head.seq:
            records.append(self._rotation(list(rotated(self.path).values())[-1].name))
        if missing is not None:
            log.error("audit_truncated", file=str(self.path), expected=missing["seq"])
        if missing is not None or not self._started:
            at = time.time()
            records.append(start_record(self._instance, self._version, self.key, at, missing))
        self.append(records)
        self._started = True

    def take_lines(self) -> list[bytes]:
        """Return the lines that were written since the last call, those of the log itself too."""
        lines, self._lines = self._lines, []
        return lines

    def append(self, records: Sequence[Record]) -> None:
        """Chain and write records.

        Raises:
            WriteFailedError: has the number of unwritten records. The file must be opened again.
        """
        written = 0
        batch: list[bytes] = []
        size = 0
        for record in records:
            line, head = seal(self._head, record, self.key)
            batch.append(line)
            size += len(line)
            self._head = head
            self._note(record)
            if self._size + size >= self._max_bytes:
                self._write(b"".join(batch), len(records) - written)
                written += len(batch)
                batch, size = [], 0
                self._rotate(len(records) - written)
        self._write(b"".join(batch), len(records) - written)

    def sync(self) -> None:
        """Flush the written records to the disk, then save the head.

        Raises:
            WriteFailedError: the disk failed; written records may be lost.
        """
        if self._descriptor is None or not self._dirty:
            return
        try:
            os.fdatasync(self._descriptor)
            self._synced = self._head
            save_head(self.path, self._head)
            self._dirty = False
        except OSError as error:
            self._fail()
            raise WriteFailedError(0, error.strerror or str(error)) from error

    def close(self) -> None:
        """Write the last record and release the file.

        Raises:
            WriteFailedError: the disk failed.
        """
        try:
            if self._descriptor is not None:
                self.append([stop_record(time.time())])
                self.sync()
                log.info("audit_closed", seq=self._head.seq, hash=self._head.hash)
        finally:
            self._fail()
            self._unlock()

    def _write(self, data: bytes, records: int) -> None:
        if self._descriptor is None:
            raise WriteFailedError(records, "the file is not open")
        done = 0
        try:
            while done < len(data):
                done += os.write(self._descriptor, data[done:])
        except OSError as error:
            self._fail()
            whole = data[:done].count(b"\n")
            raise WriteFailedError(max(0, records - whole), error.strerror or "") from error
        finally:
            self._lines += filter(None, data[:done].split(b"\n")[:-1])
            self._size += done
            self._dirty = self._dirty or done > 0

    def _rotate(self, waiting: int) -> None:
        try:
            self.sync()
        except WriteFailedError as error:
            raise WriteFailedError(waiting, error.why) from error
        number = max((self._newest, *rotated(self.path))) + 1
        target = beside(self.path, f".{number:06d}")
        try:
            self.path.rename(target)
            self._fail()
            self._descriptor = os.open(
                self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE
            )
            sync_folder(self.path)
        except OSError as error:
            self._fail()
            raise WriteFailedError(waiting, error.strerror or str(error)) from error
        self._size, self._newest = 0, number
        log.info("audit_rotated", file=target.name, seq=self._head.seq, hash=self._head.hash)
        line, self._head = seal(self._head, self._rotation(target.name), self.key)
        self._write(line, waiting)
        self._prune()

    def _rotation(self, before: str) -> Record:
        # Of files that somebody else removes, the account stays.
        if self._keep:
            self._oldest = max(self._oldest, self._newest - self._keep + 1)
        last: Mapping[str, object] = {
            "file": before,
            "seq": self._head.seq,
            "hash": self._head.hash,
        }
        return rotate_record(last, self._oldest, self.claims, self.key, time.time())

    def _note(self, record: Record) -> None:
        number = record["event"].get("seq") if record["kind"] == "claim" else None
        if isinstance(number, int):
            note_claim(self.claims, record["engine"], number)

    def _prune(self) -> None:
        files = rotated(self.path)
        for number in list(files)[: -self._keep] if self._keep else ():
            try:
                files[number].unlink()
            except OSError as error:
                log.warning("audit_not_pruned", file=files[number].name, error=error.strerror)

    def _fail(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
