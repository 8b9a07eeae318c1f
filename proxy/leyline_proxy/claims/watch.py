"""Repeated look at the engine's claims while any live, for memory, metrics and audit file.

The engine's book is the truth. Only facts that a restarted engine loses are kept here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from leyline_engine.contract import MAX_LISTED, ClaimState, ClaimStatus, GetClaimEvents, ListClaims

from ..errors import ProxyError
from ..telemetry.claim_metrics import ClaimMetrics
from ..telemetry.metrics import Metrics
from ..turns.ports import EngineLog
from ..upstream.replica import Replica
from .memory import ENGINE_RESTARTED, ClaimKey, ClaimMemory, key_of

log = structlog.get_logger("leyline.claims")

_PAGES = 16
"""Largest number of full pages of events in one look; the next look continues."""


class ClaimWatch:
    """This proxy's knowledge of one engine's claims.

    Args:
        shown: the series of all engines' claims.
        interval_s: seconds between two looks while claims live.
        counts: False where another worker of the proxy counts the engine's events.
    """

    def __init__(
        self,
        replica: Replica,
        metrics: Metrics,
        shown: ClaimMetrics,
        *,
        interval_s: float,
        audit: EngineLog,
        counts: bool = True,
    ) -> None:
        self.memory = ClaimMemory()
        self.seq = 0
        """Number of the newest event recorded here."""
        self._name = replica.name
        self._upstream = replica.client
        self._handshake = replica.handshake
        self._metrics = metrics
        self._shown = shown
        self._interval_s = interval_s
        self._audit = audit
        self._counts = counts
        self._looking = asyncio.Lock()
        self._wake = asyncio.Event()
        self._problem: str | None = None
        """The reason that the last look failed, as logged."""
        self._newest = 0
        """Number of the newest event that any caller received."""
        self._restarts: dict[ClaimKey, dict[str, Any]] = {}

    def wake(self) -> None:
        """Ask for an early look after a change."""
        self._wake.set()

    async def run(self) -> None:
        """Look until cancelled: once at a new run of the engine, and while claims live."""
        while True:
            # Read the flag before the look: changes during it need another look.
            changed = self._wake.is_set()
            self._wake.clear()
            if changed or self.memory.live() or not self._knows_engine():
                await self.look()
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
            # A burst of claims counts as one change.
            await asyncio.sleep(min(self._interval_s, 0.2))

    async def ready(self) -> None:
        """Look once before the first claim on a run of the engine, to miss none of its events."""
        if not self._knows_engine():
            await self.look()

    async def look(self) -> None:
        """Record the engine's current state. Never raises for the engine's faults."""
        async with self._looking:
            try:
                await self._look()
                self._problem = None
            except ProxyError as error:
                self._handshake.report_failure()
                if error.code != self._problem:
                    log.info("claims_unknown", error=error.code)
                self._problem = error.code

    def told(self, seq: int) -> None:
        """Record that a caller received events up to this one."""
        self._newest = max(self._newest, seq)

    def restart_event(self, key: ClaimKey) -> dict[str, Any] | None:
        """Return the event that ended a claim together with its engine."""
        return self._restarts.get(key) if self.memory.lost(key) is not None else None

    def _knows_engine(self) -> bool:
        """Return True if the current engine is the one last looked at, or takes no claims."""
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
            # The claims or the engine ended, which the handshake may not have noticed yet.
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
        """Switch to another run of the engine."""
        before = self.memory.instance
        gone = self.memory.restart(instance, listed)
        if gone:
            log.warning("claims_harmed", cause=ENGINE_RESTARTED, claims=len(gone))
            await self._tell(before or "", self._harm(gone))
        self._newest = 0
        if self._audit.on:
            self.seq = self._audit.position(instance) or 0
        else:
            # Another proxy counted the events before this one began.
            self.seq = seq if before is None else 0

    def _harm(self, gone: Sequence[ClaimStatus]) -> list[dict[str, Any]]:
        """Return events that the engine could no longer write, numbered after its last."""
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
                return  # another run of the engine answers now
            if self._counts:
                self._metrics.claim_events_missed.inc(max(0, first - self.seq - 1))
            self.seq = last
            await self._tell(instance, reply.events)
            if len(reply.events) < MAX_LISTED:
                return
        self.wake()

    async def _tell(self, instance: str, events: Sequence[Mapping[str, Any]]) -> None:
        if self._counts:
            self._shown.count(events)
        self._audit.claims(instance, events)


def _number(event: Mapping[str, Any]) -> int:
    number = event.get("seq")
    return number if isinstance(number, int) else 0
