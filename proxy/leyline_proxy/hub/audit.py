"""One audit log of all workers: the hub holds the file and its chain, workers send records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import structlog

from ..audit.chain_file import WriteFailedError
from ..audit.records import Record, lost_record
from ..audit.writer import AuditWriter
from .link import HubGoneError, HubLink
from .server import Handlers, Member, Part
from .wire import Method

log = structlog.get_logger("leyline.audit")


class LostTurn(msgspec.Struct, array_like=True, frozen=True):
    """A turn under way whose record its worker will write."""

    message_id: str
    tenant: str
    session: str
    turn: str


class _Head(msgspec.Struct, frozen=True):
    kind: str
    message_id: str = ""


RECORDS = Method("audit.records", list[bytes], type(None))
BEGUN = Method("audit.begun", LostTurn, type(None))
ENDED = Method("audit.ended", str, type(None))
PROBLEM = Method("audit.problem", type(None), str)

_LOOK_S = 0.5
"""Time between two questions of a worker."""


class HubAudit(Part):
    """The log's one writer. It names the turns of which a worker that died wrote no record."""

    def __init__(self, writer: AuditWriter) -> None:
        self._writer = writer
        self._begun: dict[Member, dict[str, LostTurn]] = {}
        """Turns under way of each worker, by message."""

    def handlers(self, handlers: Handlers) -> None:
        handlers.add(RECORDS, self._offer)
        handlers.add(BEGUN, self._begin)
        handlers.add(ENDED, self._end)
        handlers.add(PROBLEM, lambda _, __: self._writer.problem or "")

    def left(self, member: Member) -> None:
        """Record the turns of which a worker that has gone wrote no record."""
        turns = [*self._begun.pop(member, {}).values()]
        if turns:
            log.error("audit_turns_lost", turns=len(turns))
            found = [msgspec.structs.asdict(each) for each in turns]
            self._writer.offer(partial(lost_record, found, time.time()))

    def _begin(self, member: Member, turn: LostTurn) -> None:
        self._begun.setdefault(member, {})[turn.message_id] = turn

    def _end(self, member: Member, message_id: str) -> None:
        self._begun.get(member, {}).pop(message_id, None)

    def _offer(self, member: Member, records: Sequence[bytes]) -> None:
        for record in records:
            self._writer.offer(partial(msgspec.json.decode, record), len(record))
            head = _HEAD.decode(record)
            if head.kind == "turn":
                self._end(member, head.message_id)


_HEAD = msgspec.json.Decoder(_Head)


class SharedTurns:
    """Tells the hub of turns under way whose records this worker will write."""

    def __init__(self, link: HubLink) -> None:
        self._link = link

    def begun(self, turn: LostTurn) -> None:
        """Announce a record."""
        self._link.tell(BEGUN, turn)

    def ended(self, message_id: str) -> None:
        """Withdraw it: there will be none."""
        self._link.tell(ENDED, message_id)

    def failed(self, message_id: str) -> None:
        """Withdraw it, from the writer's thread."""
        self._link.tell_from_thread(ENDED, message_id)


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

    def take_lines(self) -> Sequence[bytes]:
        """Return none: the hub has them."""
        return ()

    def append(self, records: Sequence[Record]) -> None:
        """Send records, from the writer's thread.

        Raises:
            WriteFailedError: the hub has gone.
        """
        if not self._link.tell_from_thread(RECORDS, [*map(msgspec.json.encode, records)]):
            raise WriteFailedError(len(records), "the supervisor has gone")

    def sync(self) -> None:
        """Do nothing: the hub flushes."""

    def close(self) -> None:
        """Do nothing: the hub closes the file."""
