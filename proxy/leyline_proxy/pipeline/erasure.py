"""Forgets that reach engines which held a session before it moved.

A forget travels with the turn that demands it, to the engine that serves the turn. To each other
run that was given turns of the session (:mod:`..core.places`) it is carried by a request of its
own: the smallest there is, under the session's name. Until an engine confirms it, the session says
that it is owed, and it is tried again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any
from uuid import uuid4

import msgspec
import structlog

from leyline_engine.contract import EditPayload, edit_envelope, sign_envelope

from ..audit.auditor import Auditor
from ..core.places import erased, owed
from ..core.session import Place, Session
from ..core.spans import ANYTHING
from ..errors import ProxyError
from ..sessions import SessionStore
from ..telemetry.logging import frames_of
from ..telemetry.metrics import Metrics
from ..upstream.pool import ReplicaPool
from ..upstream.replica import Replica

log = structlog.get_logger("leyline.forget")

_MAX_OWED = 4096
"""Sessions whose forgets are tried again; a session's next turn tries, too."""

_AT_ONCE = 8

_ANSWER_TIMEOUT_S = 30.0
"""For a request of one token; also for one that the engine has to queue."""

_RECORD_WAITS_S = (0.0, 0.05, 0.25)

_Owner = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Done:
    """What became of one forget."""

    run: str
    seen: Place
    """As it was when this began."""
    result: str
    """``erased``, ``gone`` (the run has ended) or ``pending``."""


class Erasures:
    """Carries forgets, of a few sessions at a time."""

    def __init__(
        self,
        pool: ReplicaPool,
        store: SessionStore,
        metrics: Metrics,
        audit: Auditor,
        *,
        hints_secret: str | None,
        retry_s: float,
    ) -> None:
        self._pool = pool
        self._store = store
        self._metrics = metrics
        self._audit = audit
        self._hints_secret = hints_secret
        self._retry_s = retry_s
        self._owed: OrderedDict[_Owner, int] = OrderedDict()
        """How often they were tried."""
        self._under_way: set[_Owner] = set()
        self._silent: dict[str, float] = {}
        """Until when replicas aren't asked that didn't answer."""
        self._wake = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Sessions whose forgets aren't carried yet, as far as is known here."""
        return len(self._owed.keys() | self._under_way)

    def start(self, session: Session) -> None:
        """Begin to carry what the session says is owed; nothing is awaited."""
        if not owed(session.places):
            return
        self._keep((session.tenant, session.id), 0)
        self._wake.set()

    def _keep(self, owner: _Owner, tries: int) -> None:
        self._owed.setdefault(owner, tries)
        self._owed.move_to_end(owner)
        while len(self._owed) > _MAX_OWED:
            self._owed.popitem(last=False)

    async def run(self) -> None:
        """Carry until cancelled: at once what is new, again what an engine didn't confirm."""
        free = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                for owner in [each for each in self._owed if each not in self._under_way]:
                    # What is demanded from here on is looked at once more.
                    tries = self._owed.pop(owner)
                    self._under_way.add(owner)
                    group.create_task(self._carry_in_turn(free, owner, tries))
                try:
                    waiting = self._owed or self._under_way
                    async with asyncio.timeout(self._retry_s if waiting else None):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def _carry_in_turn(self, free: asyncio.Semaphore, owner: _Owner, tries: int) -> None:
        async with free:
            try:
                done = await self._carry(owner, tries)
            except SessionGoneError:
                done = True
            except Exception as error:  # nobody waits for it; the next look tries again
                done = False
                log.error("erasure_failed", error=type(error).__name__, frames=frames_of(error))
        self._under_way.discard(owner)
        if not done:
            self._keep(owner, tries + 1)

    async def _carry(self, owner: _Owner, tries: int) -> bool:
        """Whether nothing is left to do."""
        session = await self._store.get(*owner)
        wanted = owed(session.places) if session is not None else {}
        done: list[_Done] = []
        for run, name in wanted.items():
            result = await self._erase(owner, run, name)
            if session is not None:
                done.append(_Done(run, session.places[run], result))
            if result != "pending" or not tries:
                self._metrics.erasures.labels(result).inc()
                self._audit.carried(*owner, run, result)
        finished = [each for each in done if each.result != "pending"]
        if finished:
            found = await self._store.update(*owner, lambda found: _without(found, finished))
            wanted = owed(found.places)
        # A store that is out of reach knows of no debts, and notes no payment.
        return not wanted and self._store.problem is None

    async def _erase(self, owner: _Owner, run: str, name: str) -> str:
        # By its run first: it may have been given another name.
        replica = self._pool.holding(run) or self._pool.get(name)
        if replica is None:
            log.info("erasure_impossible", tenant=owner[0], upstream=name)
            return "pending"  # another proxy may know it
        status = replica.status
        if not status.up or monotonic() < self._silent.get(replica.name, 0):
            return "pending"
        if status.capability is None:
            return "gone" if status.settled else "pending"
        if status.retains_as != run and not status.capability.splices:
            return "gone"
        # Another run is asked, too: it may have begun before the turn that is noted for this one.
        try:
            confirmed = await self._ask(owner, replica)
        except ProxyError as error:
            self._silent[replica.name] = monotonic() + self._retry_s
            replica.handshake.report_failure()
            log.info("erasure_pending", tenant=owner[0], upstream=name, error=error.code)
            return "pending"
        return "erased" if confirmed else "pending"

    async def _ask(self, owner: _Owner, replica: Replica) -> bool:
        capability = replica.status.capability
        if capability is None:
            return False
        tenant, session = owner
        message_id = f"m-{uuid4().hex}"
        payload = EditPayload(
            session=session, scope=tenant, turn=f"e-{uuid4().hex[:12]}", forget=(ANYTHING,)
        )
        envelope = edit_envelope(message_id, payload)
        if self._hints_secret is not None:
            envelope = sign_envelope(envelope, self._hints_secret)
        body: dict[str, Any] = {
            "model": capability.model,
            "messages": [{"role": "user", "content": "."}],
            "max_tokens": 1,
            "temperature": 0,
            "custom_params": {"kv_hints": msgspec.to_builtins(envelope)},
        }
        await replica.client.complete(body, _ANSWER_TIMEOUT_S)
        for pause in _RECORD_WAITS_S:
            await asyncio.sleep(pause)
            record = await replica.client.record(message_id)
            if record is not None and record.receipt.forgot is not None:
                return True
        return False


class SessionGoneError(Exception):
    """The session has expired meanwhile; nobody knows any more what it held."""


def _without(session: Session | None, done: list[_Done]) -> Session:
    if session is None:
        raise SessionGoneError
    places = session.places
    for each in done:
        places = erased(places, each.run, each.seen)
    return replace(session, places=places)
