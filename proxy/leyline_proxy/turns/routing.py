"""Turns behind a router: the headers that keep a session in its place, and who has answered.

A router chooses the engine, so the proxy plans for the engine that had the session's last turn, and
learns from the record of each turn which engine has served it. A record carries the name of the
engine's run. Whatever the router does, the engine itself checks each source against its own
records, so a turn that comes to another engine is an ordinary prefill there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum

import structlog

from leyline_engine.contract import TurnRecord

from ..errors import UnsupportedError
from ..model.session import Session
from ..telemetry.metrics import Metrics
from ..tenants import Tenant
from ..upstream.affinity import steering, tokens_in
from ..upstream.headers import RawHeaders
from ..upstream.pool import ReplicaPool
from ..upstream.replica import Replica
from .records import record_of
from .turn import Turn

log = structlog.get_logger("leyline.router")

_SIBLING_WAITS_S = (0.0, 0.05)
"""Pauses before each request to an engine that isn't expected to have the record."""

_MAX_NOTES = 4096
"""Answers under way whose headers are kept."""

STRANGER = "unknown"
"""Metric label of an engine that isn't among the upstreams."""


class Answered(StrEnum):
    """The engine that has answered a turn."""

    FIRST = "first"
    """Any engine: the session had none."""
    HOLDER = "holder"
    """The engine that has the session's sources."""
    MOVED = "moved"
    """Another engine of the settings."""
    RESTARTED = "restarted"
    """The same engine, in a later run, which has none of the session's sources."""
    UNKNOWN = "unknown"
    """An engine that isn't among the upstreams."""
    UNRECORDED = "unrecorded"
    """Nobody knows: no engine has a record."""


def home_of(session: Session | None) -> str:
    """Return the run that served the session's last turn; empty if none is known."""
    last = session.last if session is not None else None
    return last.model_fingerprint if last is not None else ""


class Routing:
    """Knows which engines are behind routers, and which one has answered.

    Args:
        affinity_header: a further header with the session's id.
    """

    def __init__(
        self, pool: ReplicaPool, metrics: Metrics, *, affinity_header: str | None = None
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._affinity_header = affinity_header
        self._notes: OrderedDict[str, dict[str, str]] = OrderedDict()
        """Names of engines in the headers of answers, by message."""

    def check_scope(self, tenant: Tenant, replica: Replica) -> None:
        """Refuse a request whose KV others would share, because its salt may get lost on the way.

        Raises:
            UnsupportedError: an engine behind the router doesn't unpack it, or has never answered
                the proxy: the router may reach it all the same.
        """
        if tenant.cache_salt is None or replica.router is None:
            return
        for each in self._pool.behind(replica):
            if not each.status.unpacks:
                fix = (
                    "Run Leyline's plugin on all engines behind the router, or list these engines "
                    "without router."
                    if each.status.up
                    else "The proxy hasn't reached this engine yet: make it reachable, or remove "
                    "it from upstreams and from the router."
                )
                raise UnsupportedError(
                    f"The router in front of {each.name} may drop the cache_salt that keeps a "
                    f"tenant's KV apart, as cache_scope: tenant asks for. {fix}",
                    code="cache_scope_unsupported",
                )

    def headers(self, turn: Turn) -> RawHeaders:
        """Return the proxy's own headers of a turn."""
        tenant, session_id = turn.request.tenant.name, turn.identity.session_id
        known = turn.replica.affinity if turn.replica.router is not None else None
        return steering(tenant, session_id, known, self._affinity_header)

    def note(self, turn: Turn, headers: Mapping[str, str]) -> None:
        """Keep what an answer's headers say about its engine until the turn is settled."""
        if turn.replica.router is None or not (found := tokens_in(headers)):
            return
        self._notes[turn.message_id] = found
        while len(self._notes) > _MAX_NOTES:
            self._notes.popitem(last=False)

    async def record(
        self, turn: Turn, came: TurnRecord | None, deadline: float
    ) -> TurnRecord | None:
        """Return a turn's record, from whichever engine has it; see :func:`record_of`."""
        beside = [each for each in self._pool.behind(turn.replica) if each is not turn.replica]
        if came is not None or not turn.enveloped or not beside:
            return await record_of(turn, came, deadline)
        asked = [
            each.records.ask(turn.message_id, _SIBLING_WAITS_S, deadline, due=False)
            for each in beside
        ]
        own, *others = await asyncio.gather(record_of(turn, None, deadline), *asked)
        return next((each for each in (own, *others) if each is not None), None)

    async def answered(self, turn: Turn, record: TurnRecord | None, deadline: float) -> Turn:
        """Return the turn at the engine that has answered it.

        Args:
            record: it may name the engine's run.
            deadline: for questions to the engines.
        """
        tokens = self._notes.pop(turn.message_id, None)
        if not turn.enveloped or (turn.replica.router is None and not _differs(turn, record)):
            return turn
        if record is None or not record.instance:
            self._count(turn, turn.replica.name, Answered.UNRECORDED)
            return turn
        replica = await self._find(turn, record.instance, deadline)
        if replica is None:
            return self._at_stranger(turn, record.instance)
        if tokens:
            replica.affinity.update(tokens)
        how = _how(turn, replica, record.instance)
        self._count(turn, replica.name, how)
        if how in (Answered.FIRST, Answered.HOLDER) and replica is turn.replica:
            return turn
        return replace(turn, replica=replica, status=replica.status)

    async def _find(self, turn: Turn, instance: str, deadline: float) -> Replica | None:
        """Return the replica that runs under a name, after a look at those that may have
        restarted."""
        found = self._pool.running(instance)
        if found is not None:
            return found
        suspects = self._pool.behind(turn.replica) or [turn.replica]
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await asyncio.gather(*(each.handshake.refresh_if_older(0.0) for each in suspects))
        return self._pool.running(instance)

    def _at_stranger(self, turn: Turn, instance: str) -> Turn:
        self._count(turn, STRANGER, Answered.UNKNOWN)
        log.warning(
            "router_unknown_engine",
            tenant=turn.request.tenant.name,
            expected=turn.replica.name,
            instance=instance,
            fix="name every engine behind the router or load balancer in upstreams",
        )
        return replace(turn, stranger=instance)

    def _count(self, turn: Turn, name: str, how: Answered) -> None:
        self._metrics.router_answers.labels(name, how.value).inc()
        if how in (Answered.MOVED, Answered.RESTARTED):
            log.warning(
                "router_moved_session",
                tenant=turn.request.tenant.name,
                held_by=turn.replica.name,
                answered_by=name,
                why=how.value,
            )


def _differs(turn: Turn, record: TurnRecord | None) -> bool:
    """Return True if another run than the expected one has answered."""
    if record is None or not record.instance or not turn.status.instance:
        return False
    return record.instance != turn.status.instance


def _how(turn: Turn, replica: Replica, instance: str) -> Answered:
    last = turn.identity.session.last if turn.identity.session is not None else None
    if last is None:
        return Answered.FIRST if turn.replica.router is not None else Answered.RESTARTED
    if last.model_fingerprint.endswith(f"@{instance}"):
        return Answered.HOLDER
    if replica.name == last.replica:
        return Answered.RESTARTED
    return Answered.MOVED
