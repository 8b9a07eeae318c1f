"""The audit file: every event of the engine's claims as a line of JSON, appended and never changed.

A line is the event as the engine numbered it, with ``engine`` (the engine's run) and ``at`` (when
it was written here). Numbers of one run have no gap, so a reader sees what is missing. The file
itself says where to go on, so that a proxy that is restarted repeats nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import structlog

from .metrics import Metrics

log = structlog.get_logger("leyline.audit")

_TAIL_BYTES = 256 * 1024
"""Of the file's end, where the last event of an engine is looked for."""

_MODE = 0o600


class AuditFile:
    """Appends events. A disk that fails costs events, which are counted, and never a request."""

    def __init__(self, path: Path, metrics: Metrics) -> None:
        self._path = path
        self._metrics = metrics
        self._failing = False

    async def position(self, instance: str) -> int | None:
        """Number of the last event of this run of the engine in the file; None for none."""
        return await asyncio.to_thread(self._position, instance)

    async def append(self, instance: str, events: Sequence[Mapping[str, Any]]) -> None:
        """Write events of one run of the engine."""
        if events:
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            lines = msgspec.json.Encoder().encode_lines(
                [{"at": at, "engine": instance, **event} for event in events]
            )
            await asyncio.to_thread(self._append, lines, len(events))

    def _append(self, lines: bytes, count: int) -> None:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _MODE)
            with os.fdopen(descriptor, "ab", buffering=0) as file:
                written = file.write(lines)
                if written != len(lines):
                    raise OSError("the disk took a part of the events only")
        except OSError as error:
            self._metrics.audit_failures.inc(count)
            if not self._failing:
                log.error("audit_failed", file=str(self._path), error=error.strerror or str(error))
            self._failing = True
        else:
            self._failing = False

    def _position(self, instance: str) -> int | None:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                lines = file.read().splitlines()
        except OSError:
            return None
        for line in reversed(lines):
            try:
                event = msgspec.json.decode(line)
                if event["engine"] == instance:
                    return int(event["seq"])
            except (msgspec.DecodeError, KeyError, TypeError, ValueError):
                continue  # cut off at its front, or torn by a full disk
        return None
