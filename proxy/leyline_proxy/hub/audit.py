"""One audit log of all workers: the hub holds the file and its chain, workers send records."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from ..audit.chain_file import WriteFailedError
from ..audit.records import Record
from ..audit.writer import AuditWriter
from .link import HubGoneError, HubLink
from .server import Handlers, Member
from .wire import Method

RECORDS = Method("audit.records", list[bytes], type(None))
PROBLEM = Method("audit.problem", type(None), str)

_LOOK_S = 0.5
"""Time between two questions of a worker."""


class HubAudit:
    """The log's one writer."""

    def __init__(self, writer: AuditWriter) -> None:
        self._writer = writer

    def handlers(self, handlers: Handlers) -> None:
        """Add the answers to workers' records."""
        handlers.add(RECORDS, lambda _, records: self._offer(records))
        handlers.add(PROBLEM, lambda _, __: self._writer.problem or "")

    def left(self, member: Member) -> None:
        """Do nothing: what a worker has sent is in the queue."""

    def _offer(self, records: Sequence[bytes]) -> None:
        for record in records:
            self._writer.offer(partial(msgspec.json.decode, record), len(record))


class SharedLog:
    """The file of a worker's :class:`~leyline_proxy.audit.writer.AuditWriter`: the hub's.

    Args:
        path: of the file, for messages.
    """

    def __init__(self, link: HubLink, path: Path) -> None:
        self.path = path
        self.is_open = True
        self.problem: str | None = None
        """The hub's, as of the last question."""
        self._link = link

    @property
    def claims(self) -> Mapping[str, int]:
        """Numbers of the newest claim events in the log, by run of an engine; of this start."""
        return self._link.welcome.claims

    async def watch(self) -> None:
        """Ask the hub for its problem, until cancelled."""
        with suppress(HubGoneError):  # then this worker stops
            while True:
                self.problem = await self._link.ask(PROBLEM, None) or None
                await asyncio.sleep(_LOOK_S)

    def claim(self) -> None:
        """Do nothing: the hub has locked the file."""

    def open(self) -> None:
        """Do nothing: the hub has opened the file."""

    def append(self, records: Sequence[Record]) -> Sequence[bytes]:
        """Send records, from the writer's thread.

        Raises:
            WriteFailedError: the hub has gone.
        """
        if not self._link.tell_from_thread(RECORDS, [*map(msgspec.json.encode, records)]):
            raise WriteFailedError(len(records), "the supervisor has gone")
        return ()

    def sync(self) -> None:
        """Do nothing: the hub flushes."""

    def close(self) -> None:
        """Do nothing: the hub closes the file."""
