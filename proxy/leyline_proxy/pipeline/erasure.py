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
from typing import Any
from uuid import uuid4

import msgspec
import structlog

from leyline_engine.contract import EditPayload, edit_envelope, sign_envelope

from ..audit.auditor import Auditor
from ..core.places import erased, owed
from ..core.session import Session
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

_RECORD_WAITS_S = (0.0, 0.05, 0.25)

_Owner = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Done:
    """What became of one forget."""

    run: str
    result: str
    """``erased``, ``gone`` (the run has ended) or ``pending``."""


class Erasures:
    """Carries forgets, one session at a time."""

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
        self._owed: OrderedDict[_Owner, None] = OrderedDict()
        self._wake = asyncio.Event()

    def start(self, session: Session) -> None:
        """Begin to carry what the session says is owed; nothing is awaited."""
        if not owed(session.places):
            return
        self._owed[session.tenant, session.id] = None
        self._owed.move_to_end((session.tenant, session.id))
        while len(self._owed) > _MAX_OWED:
            self._owed.popitem(last=False)
        self._wake.set()

    async def run(self) -> None:
        """Carry until cancelled: at once what is new, again what an engine didn't confirm."""
        while True:
            self._wake.clear()
            for owner in tuple(self._owed):
                await self._carry(owner)
            try:
                async with asyncio.timeout(self._retry_s if self._owed else None):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _carry(self, owner: _Owner) -> None:
        try:
            session = await self._store.get(*owner)
            wanted = owed(session.places) if session is not None else {}
            done = [await self._erase(owner, run, name) for run, name in wanted.items()]
            for each in done:
                self._metrics.erasures.labels(each.result).inc()
                self._audit.carried(*owner, each.run, each.result)
            finished = [each.run for each in done if each.result != "pending"]
            if finished:
                await self._store.update(*owner, lambda found: _without(found, finished))
            if len(finished) == len(wanted):
                self._owed.pop(owner, None)
        except SessionGoneError:
            self._owed.pop(owner, None)
        except Exception as error:  # nobody waits for it; the next look tries again
            log.error("erasure_failed", error=type(error).__name__, frames=frames_of(error))

    async def _erase(self, owner: _Owner, run: str, name: str) -> _Done:
        replica = self._pool.get(name)
        if replica is None:
            log.warning("erasure_impossible", tenant=owner[0], upstream=name)
            return _Done(run, "gone")  # nobody here can reach it any more
        if not replica.status.up:
            return _Done(run, "pending")
        if replica.status.retains_as != run:
            return _Done(run, "gone")
        try:
            confirmed = await self._ask(owner, replica)
        except ProxyError as error:
            replica.handshake.report_failure()
            log.info("erasure_pending", tenant=owner[0], upstream=name, error=error.code)
            return _Done(run, "pending")
        return _Done(run, "erased" if confirmed else "pending")

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
        await replica.client.complete(body)
        for pause in _RECORD_WAITS_S:
            await asyncio.sleep(pause)
            record = await replica.client.record(message_id)
            if record is not None and record.receipt.forgot is not None:
                return True
        return False


class SessionGoneError(Exception):
    """The session has expired meanwhile; nobody knows any more what it held."""


def _without(session: Session | None, runs: list[str]) -> Session:
    if session is None:
        raise SessionGoneError
    places = session.places
    for run in runs:
        places = erased(places, run)
    return replace(session, places=places)
