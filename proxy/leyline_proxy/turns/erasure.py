"""Unconfirmed forgets, and their way to the engines.

A forget travels with the turn that demands it, to the engine that serves the turn. That engine owes
it until a receipt confirms it; each other run that received turns of the session
(:mod:`..model.places`) owes it in any case. A separate request carries an owed forget: the smallest
possible one, under the session's name, repeated until confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic

import structlog

from leyline_engine.contract import Receipt

from ..audit.followup import is_closed
from ..errors import ForgetsOwedError, ProxyError
from ..model.places import erased, is_unknown_run, owed
from ..model.session import Place, Session
from ..sessions import SessionStore
from ..telemetry.logging import frames_of
from ..telemetry.metrics import Metrics
from ..upstream.pool import ReplicaPool
from ..upstream.replica import Replica
from .asking import ask_forget
from .ports import EngineLog

log = structlog.get_logger("leyline.forget")

_AT_ONCE = 8

PLAIN_GRACE_S = 600.0
"""Time for an engine that hides its capability document to show it again, before its debts are
lost: a restart without the plugin and a broken route look alike."""

_Owner = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Debt:
    """The last known debts of a session's engines; outlives the session."""

    runs: Mapping[str, str]
    """Replicas by run."""
    created: float
    """Start of the session, in seconds since the epoch."""
    tries: int = 0


@dataclass(frozen=True, slots=True)
class _Done:
    """The result of one forget."""

    run: str
    seen: Place
    """The place when the forget began."""
    result: str
    """``erased``, ``held`` (the engine confirmed it, and overwrites the rest when the requests that
    hold it end), ``gone`` (the run has ended), ``pending``, or ``lost``: the session has expired
    and the engine is unknown, or the engine takes no forgets any more."""


class Erasures:
    """Carries forgets, of a few sessions at a time.

    Args:
        max_owed: number of a tenant's sessions whose forgets may wait; further demands are refused.
        retry_s: pause before an unconfirmed forget is sent again.
        plain_grace_s: time that an engine without a capability document has to show one again.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        store: SessionStore,
        metrics: Metrics,
        audit: EngineLog,
        *,
        hints_secret: str | None,
        retry_s: float,
        max_owed: int,
        plain_grace_s: float = PLAIN_GRACE_S,
    ) -> None:
        self._pool = pool
        self._store = store
        self._metrics = metrics
        self._audit = audit
        self._hints_secret = hints_secret
        self._retry_s = retry_s
        self._max_owed = max_owed
        self._plain_grace_s = plain_grace_s
        self._plain_since: dict[str, float] = {}
        """Times at which engines that owe were first seen without a capability document, by run."""
        self._owed: dict[_Owner, _Debt] = {}
        self._under_way: dict[_Owner, _Debt] = {}
        self._silent: dict[str, float] = {}
        """Times until which unresponsive replicas aren't asked."""
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Number of sessions with forgets not carried yet, as far as is known here."""
        return len(self._owed.keys() | self._under_way.keys())

    def check(self, tenant: str) -> None:
        """Check that one more demand of a tenant can be remembered.

        Raises:
            ForgetsOwedError: it can't, so it must not be made.
        """
        if self.waiting < self._max_owed:
            return
        owners = self._owed.keys() | self._under_way.keys()
        if sum(owner == tenant for owner, _ in owners) >= self._max_owed:
            raise ForgetsOwedError(self._max_owed, self._retry_s)

    def start(self, session: Session) -> None:
        """Begin to carry the session's owed forgets, without waiting."""
        if runs := owed(session.places):
            self._keep((session.tenant, session.id), _Debt(runs, session.created))
            self._wake.set()

    def owe(self, tenant: str, session: str, run: str, replica: str) -> None:
        """Begin to carry a forget of all that one run of an engine holds of a session."""
        self._keep((tenant, session), _Debt({run: replica}, created=0.0))
        self._wake.set()

    async def carried(self, tenant: str, session_id: str, within_s: float) -> bool:
        """Wait until nothing of a session waits to be carried; return False after ``within_s``."""
        owner = (tenant, session_id)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while owner in self._owed or owner in self._under_way:
                    self._ended.clear()
                    await self._ended.wait()
                return True
        return False

    def _keep(self, owner: _Owner, debt: _Debt) -> None:
        known = self._owed.get(owner)
        if known is not None:
            debt = replace(debt, runs={**known.runs, **debt.runs}, tries=known.tries)
        self._owed[owner] = debt

    async def run(self) -> None:
        """Carry until cancelled: new forgets at once, unconfirmed ones again."""
        try:
            await self._run()
        finally:
            if self.waiting:
                log.warning("forgets_owed_at_stop", sessions=self.waiting)

    async def _run(self) -> None:
        free = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                for owner in [each for each in self._owed if each not in self._under_way]:
                    # Demands from here on are checked once more.
                    self._under_way[owner] = self._owed.pop(owner)
                    group.create_task(self._carry_in_turn(free, owner))
                try:
                    waiting = self._owed or self._under_way
                    async with asyncio.timeout(self._retry_s if waiting else None):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def _carry_in_turn(self, free: asyncio.Semaphore, owner: _Owner) -> None:
        debt = self._under_way[owner]
        rest = debt.runs
        async with free:
            try:
                rest = await self._carry(owner, debt)
            except Exception as error:  # no caller waits for it; the next round tries again
                log.error("erasure_failed", error=type(error).__name__, frames=frames_of(error))
        del self._under_way[owner]
        if rest:
            self._keep(owner, replace(debt, runs=rest, tries=debt.tries + 1))
        self._ended.set()

    async def _carry(self, owner: _Owner, debt: _Debt) -> Mapping[str, str]:
        """Return the replicas, by run, that still owe afterwards."""
        session = await self._store.get(*owner)
        if self._store.problem is not None:
            return debt.runs  # the store knows of no debts, and records no payment
        places = session.places if session is not None else {}
        wanted: Mapping[str, str] = owed(places)
        if session is None or session.created != debt.created:
            wanted = {**debt.runs, **wanted}  # the session that owed it has expired
        done: list[_Done] = []
        for run, name in wanted.items():
            result = await self._erase(owner, run, name, expired=session is None)
            done.append(_Done(run, places.get(run, Place(name, owed=True)), result))
            if result == "held":
                self._metrics.erasures.labels("erased").inc()
            elif result != "pending" or not debt.tries:
                self._metrics.erasures.labels(result).inc()
                self._audit.carried(*owner, run, result)
        finished = [each for each in done if each.result != "pending"]
        paid = {each.run for each in finished}
        for run in paid:
            self._plain_since.pop(run, None)
        rest = {run: name for run, name in wanted.items() if run not in paid}
        if session is not None and finished:
            with suppress(SessionGoneError):  # expired meanwhile; its debts remain
                found = await self._store.update(*owner, lambda now: _without(now, finished))
                rest.update(owed(found.places))
        return rest

    async def _erase(self, owner: _Owner, run: str, name: str, *, expired: bool) -> str:
        # Search by run first: the replica may have another name now.
        replica = self._pool.holding(run) or self._pool.get(name)
        if replica is None:
            log.warning("erasure_impossible", tenant=owner[0], upstream=name, given_up=expired)
            return "lost" if expired else "pending"  # another proxy may know it
        status = replica.status
        if not status.up or monotonic() < self._silent.get(replica.name, 0):
            return "pending"
        unknown = is_unknown_run(run)
        if status.capability is None:
            return self._without_capability(run) if status.settled else "pending"
        self._plain_since.pop(run, None)
        if status.retains_as != run and not status.capability.splices and not unknown:
            return "gone"
        # Ask another run as well: it may have begun before the turn that is recorded for this one.
        try:
            record = await ask_forget(replica, owner, hints_secret=self._hints_secret)
        except ProxyError as error:
            self._silent[replica.name] = monotonic() + self._retry_s
            replica.handshake.report_failure()
            log.info("erasure_pending", tenant=owner[0], upstream=name, error=error.code)
            return "pending"
        receipt = record.receipt if record is not None else None
        return "pending" if receipt is None else self._confirmed(owner, run, receipt, replica)

    def _without_capability(self, run: str) -> str:
        """Return the result for an engine that answers as a plain server, in which no forget finds
        KV."""
        waited = monotonic() - self._plain_since.setdefault(run, monotonic())
        return "pending" if waited < self._plain_grace_s else "lost"

    def _confirmed(self, owner: _Owner, run: str, receipt: Receipt, replica: Replica) -> str:
        if is_closed(receipt):
            return "erased"
        # The KV can't be found, and the engine overwrites it without being asked again.
        self._audit.held(owner, run, receipt, replica.client.record)
        return "held"


class SessionGoneError(Exception):
    """The session has expired meanwhile."""


def _without(session: Session | None, done: list[_Done]) -> Session:
    if session is None:
        raise SessionGoneError
    places = session.places
    for each in done:
        places = erased(places, each.run, each.seen)
    return replace(session, places=places)
