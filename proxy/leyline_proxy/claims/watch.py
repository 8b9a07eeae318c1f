"""Looks at the engine's claims, again and again while any live: memory, metrics, audit file.

The engine's book is the truth. What is kept here is only what a restarted engine can't tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from leyline_engine.contract import (
    MAX_LISTED,
    ClaimState,
    ClaimStatus,
    GetClaimEvents,
    ListClaims,
)

from ..errors import ProxyError
from ..telemetry.claims import ClaimMetrics
from ..telemetry.metrics import Metrics
from ..turns.ports import EngineLog
from ..upstream.replica import Replica
from .memory import ENGINE_RESTARTED, ClaimKey, ClaimMemory, key_of

log = structlog.get_logger("leyline.claims")

_PAGES = 16
"""Answers full of events in one look; the next look goes on."""


class ClaimWatch:
    """What this proxy knows of one engine's claims.

    Args:
        shown: the series of all engines' claims.
        interval_s: between two looks while claims live.
    """

    def __init__(
        self,
        replica: Replica,
        metrics: Metrics,
        shown: ClaimMetrics,
        *,
        interval_s: float,
        audit: EngineLog,
    ) -> None:
        self.memory = ClaimMemory()
        self.seq = 0
        """Number of the newest event that was taken in."""
        self._name = replica.name
        self._upstream = replica.client
        self._handshake = replica.handshake
        self._metrics = metrics
        self._shown = shown
        self._interval_s = interval_s
        self._audit = audit
        self._looking = asyncio.Lock()
        self._wake = asyncio.Event()
        self._newest = 0
        """Number of the newest event that anybody was told of."""
        self._restarts: dict[ClaimKey, dict[str, Any]] = {}

    def wake(self) -> None:
        """Something changed: look soon."""
        self._wake.set()

    async def run(self) -> None:
        """Look until cancelled: at a new run of the engine once, and while claims live."""
        while True:
            # Read before the look: what comes during it is looked at once more.
            changed = self._wake.is_set()
            self._wake.clear()
            if changed or self.memory.live() or not self._knows_engine():
                await self.look()
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
            # A burst of claims is one change.
            await asyncio.sleep(min(self._interval_s, 0.2))

    async def ready(self) -> None:
        """Look once before the first claim on a run of the engine, to miss none of its events."""
        if not self._knows_engine():
            await self.look()

    async def look(self) -> None:
        """Take in what the engine says now. Never raises for what it does."""
        async with self._looking:
            try:
                await self._look()
            except ProxyError as error:
                self._handshake.report_failure()
                log.info("claims_unknown", error=error.code)

    def told(self, seq: int) -> None:
        """A caller was told of events up to this one."""
        self._newest = max(self._newest, seq)

    def restart_event(self, key: ClaimKey) -> dict[str, Any] | None:
        """The event that ended a claim together with its engine."""
        return self._restarts.get(key) if self.memory.lost(key) is not None else None

    def _knows_engine(self) -> bool:
        """Whether the engine that is there is the one last looked at, or takes no claims."""
        status = self._handshake.status
        return not status.takes_claims or status.instance == self.memory.instance

    async def _look(self) -> None:
        status = self._handshake.status
        if not status.up or not status.takes_claims:
            return
        listed = await self._upstream.claims(ListClaims())
        whole = len(listed.claims) < MAX_LISTED
        same = status.instance == self.memory.instance
        if same and whole and self.memory.missing(listed.claims):
            # They ended, or the engine did, which the handshake may not have noticed yet.
            status = await self._handshake.refresh()
            if not status.up or not status.takes_claims:
                return
            if status.instance != self.memory.instance:
                listed = await self._upstream.claims(ListClaims())
        if status.instance != self.memory.instance:
            await self._begin(status.instance, listed.claims, listed.seq)
        else:
            self.memory.update(listed.claims, whole=whole)
        self._shown.publish(self._name, self.memory.live())
        await self._take_events(status.instance)

    async def _begin(self, instance: str, listed: Sequence[ClaimStatus], seq: int) -> None:
        """Go over to another run of the engine."""
        before = self.memory.instance
        gone = self.memory.restart(instance, listed)
        if gone:
            log.warning("claims_harmed", cause=ENGINE_RESTARTED, claims=len(gone))
            await self._tell(before or "", self._harm(gone))
        self._newest = 0
        if self._audit.on:
            self.seq = self._audit.position(instance) or 0
        else:
            # What was counted before this proxy began was counted by another.
            self.seq = seq if before is None else 0

    def _harm(self, gone: Sequence[ClaimStatus]) -> list[dict[str, Any]]:
        """The events that the engine could not write any more, behind its last."""
        first = max(self.seq, self._newest) + 1
        events: dict[ClaimKey, dict[str, Any]] = {
            key_of(status): {
                "event": ClaimState.HARMED.value,
                "seq": seq,
                "tenant": status.claim.tenant,
                "claim": status.claim.id,
                "cause": ENGINE_RESTARTED,
            }
            for seq, status in enumerate(gone, first)
        }
        known = {key: e for key, e in self._restarts.items() if self.memory.lost(key) is not None}
        self._restarts = {**known, **events}
        return list(events.values())

    async def _take_events(self, instance: str) -> None:
        for _ in range(_PAGES):
            reply = await self._upstream.claims(GetClaimEvents(after=self.seq))
            if not reply.events:
                return
            first, last = _number(reply.events[0]), _number(reply.events[-1])
            if last <= self.seq:
                return  # another run of the engine answers by now
            self._metrics.claim_events_missed.inc(max(0, first - self.seq - 1))
            self.seq = last
            await self._tell(instance, reply.events)
            if len(reply.events) < MAX_LISTED:
                return
        self.wake()

    async def _tell(self, instance: str, events: Sequence[Mapping[str, Any]]) -> None:
        self._shown.count(events)
        self._audit.claims(instance, events)


def _number(event: Mapping[str, Any]) -> int:
    number = event.get("seq")
    return number if isinstance(number, int) else 0
