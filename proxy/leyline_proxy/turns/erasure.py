"""Unconfirmed forgets, and their way to the engines.

A forget travels with the turn that demands it, to the engine that serves the turn. That engine owes
it until a receipt confirms it; each other run that received turns of the session
(:mod:`..model.places`) owes it in any case. A separate request carries an owed forget: the smallest
possible one, under the session's name, repeated until confirmed. If this process dies meanwhile,
another one finds its debts in their store (:mod:`..debts`), and those of turns that it had under
way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any
from uuid import uuid4

import msgspec
import structlog

from leyline_engine.contract import (
    EditPayload,
    ProvePayload,
    Receipt,
    TurnRecord,
    edit_envelope,
    sign_envelope,
)

from ..audit.followup import is_closed
from ..debts import Debt, Debts, DebtStore, older
from ..errors import ForgetsOwedError, ProxyError
from ..model.places import erased, is_unknown_run, owed
from ..model.session import Place, Session
from ..model.spans import ANYTHING
from ..sessions import SessionStore
from ..telemetry.logging import frames_of
from ..telemetry.metrics import Metrics
from ..upstream.pool import ReplicaPool
from ..upstream.replica import Replica
from .ports import EngineLog

log = structlog.get_logger("leyline.forget")

_AT_ONCE = 8

PLAIN_GRACE_S = 600.0
"""Time for an engine that hides its capability document to show it again, before its debts are
lost: a restart without the plugin and a broken route look alike."""

_Owner = tuple[str, str]

_BEAT_S = 2.0
"""Pause between two looks for debts of processes that have gone."""

_ANSWER_TIMEOUT_S = 30.0
"""Timeout of a request for one token, including its time in the engine's queue."""

_RECORD_WAITS_S = (0.0, 0.05, 0.25)


@dataclass(frozen=True, slots=True)
class _Debt:
    """The last known debts of a session's engines; outlives the session."""

    runs: Mapping[str, Debt]
    """Debts by run."""
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
        debts: holds the debts for other processes, in case that this one dies.
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
        debts: DebtStore,
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
        self._demanded: dict[_Owner, dict[str, tuple[Debt, ...]]] = {}
        """What sessions will owe if this process dies in turns that demand a forget, by turn."""
        self.debts = Debts(debts, self._carried_now)
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

    def start(self, session: Session, demand: str | None = None) -> None:
        """Begin to carry the session's owed forgets, without waiting.

        Args:
            demand: a demand that has ended; see :meth:`demanded`.
        """
        owner = session.tenant, session.id
        if demand is not None:
            self._ended_demand(owner, demand)
        if runs := owed(session.places):
            self._keep(owner, _Debt(_debts(owner, runs, session.created)))
            self._wake.set()

    def owe(self, tenant: str, session: str, run: str, replica: str) -> None:
        """Begin to carry a forget of all that one run of an engine holds of a session."""
        self._keep((tenant, session), _Debt(_debts((tenant, session), {run: replica})))
        self._wake.set()

    async def demanded(self, owner: _Owner, demand: str, runs: Mapping[str, str]) -> None:
        """Note that a demand is under way to engines: if this process dies in it, they owe it.

        Args:
            owner: tenant and session.
            demand: name of the turn; :meth:`start` ends it.
            runs: replicas by run.
        """
        noted = tuple(_debts(owner, runs).values())
        self._demanded.setdefault(owner, {})[demand] = noted
        self.debts.changed(owner)
        try:
            await self.debts.save()
        except BaseException:
            self._ended_demand(owner, demand)
            raise

    @asynccontextmanager
    async def during(self, session: Session) -> AsyncIterator[None]:
        """Leave a session's owed forgets to the caller, and carry afterwards what is left."""
        demand, owner = uuid4().hex, (session.tenant, session.id)
        await self.demanded(owner, demand, owed(session.places))
        try:
            yield
        finally:
            self.start(session, demand)

    async def saved(self) -> None:
        """Wait until the store knows all debts, or can't be reached."""
        await self.debts.save()

    def _ended_demand(self, owner: _Owner, demand: str) -> None:
        known = self._demanded.get(owner, {})
        if known.pop(demand, None) is not None:
            self.debts.changed(owner)
        if not known:
            self._demanded.pop(owner, None)

    def _carried_now(self, owner: _Owner) -> Iterable[Debt]:
        """Return all debts of a session, carried or demanded."""
        found: dict[str, Debt] = {}
        for book in (self._owed, self._under_way):
            if owner in book:
                _merge(found, book[owner].runs.values())
        for noted in self._demanded.get(owner, {}).values():
            _merge(found, noted)
        return found.values()

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
        self._owed[owner] = debt if known is None else _together(known, debt)
        self.debts.changed(owner)

    async def run(self) -> None:
        """Carry until cancelled: new forgets at once, unconfirmed ones again."""
        try:
            await self._run()
        finally:
            if self.waiting:
                log.warning("forgets_owed_at_stop", sessions=self.waiting)

    async def aclose(self) -> None:
        """Leave what is owed to other processes, after everything that may owe more has ended."""
        await self.debts.aclose()

    async def _run(self) -> None:
        free = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._inherit())
            while True:
                self._wake.clear()
                for owner in [each for each in self._owed if each not in self._under_way]:
                    # Demands from here on are checked once more.
                    self._under_way[owner] = self._owed.pop(owner)
                    group.create_task(self._carry_in_turn(free, owner))
                group.create_task(self.debts.save())
                try:
                    waiting = self._owed or self._under_way
                    async with asyncio.timeout(self._retry_s if waiting else None):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def _inherit(self) -> None:
        """Take over the debts of processes that have gone, until cancelled."""
        while True:
            found = await self.debts.inherit()
            new = [each for each in found if each not in self._carried_now(each.owner)]
            for each in new:
                self._keep(each.owner, _Debt({each.run: each}))
            if new:
                log.warning("forgets_inherited", sessions=len({each.owner for each in new}))
                self._wake.set()
            await asyncio.sleep(_BEAT_S)

    async def _carry_in_turn(self, free: asyncio.Semaphore, owner: _Owner) -> None:
        debt = self._under_way[owner]
        rest: Mapping[str, Debt] = debt.runs
        async with free:
            try:
                rest = await self._carry(owner, debt)
            except Exception as error:  # no caller waits for it; the next round tries again
                log.error("erasure_failed", error=type(error).__name__, frames=frames_of(error))
        del self._under_way[owner]
        if rest:
            self._owed[owner] = _together(_Debt(rest, debt.tries + 1), self._owed.get(owner))
        if rest.keys() != debt.runs.keys():
            self.debts.changed(owner)
        self._ended.set()
        await self.debts.save()

    async def _carry(self, owner: _Owner, debt: _Debt) -> Mapping[str, Debt]:
        """Return the debts, by run, that are left afterwards."""
        session = await self._store.get(*owner)
        if self._store.problem is not None:
            return debt.runs  # the store knows of no debts, and records no payment
        places = session.places if session is not None else {}
        wanted: Mapping[str, str] = owed(places)
        # A session that has expired since, or never knew of a debt, doesn't say that it is paid.
        beside = {
            run: each.replica
            for run, each in debt.runs.items()
            if session is None or session.created != each.created
        }
        wanted = {**beside, **wanted}
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
        created = session.created if session is not None else 0.0
        rest = {run: name for run, name in wanted.items() if run not in paid}
        if session is not None and finished:
            with suppress(SessionGoneError):  # expired meanwhile; its debts remain
                found = await self._store.update(*owner, lambda now: _without(now, finished))
                rest.update(owed(found.places))
        return {**_debts(owner, rest, created), **{r: debt.runs[r] for r in rest if r in debt.runs}}

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


def _debts(owner: _Owner, runs: Mapping[str, str], created: float = 0.0) -> dict[str, Debt]:
    return {run: Debt(*owner, run, replica, created) for run, replica in runs.items()}


def _merge(into: dict[str, Debt], debts: Iterable[Debt]) -> None:
    for each in debts:
        into[each.run] = older(each, into.get(each.run))


def _together(debt: _Debt, other: _Debt | None) -> _Debt:
    """Return both debts of a session, with the number of tries of the first."""
    runs = dict(debt.runs)
    _merge(runs, other.runs.values() if other is not None else ())
    return _Debt(runs, debt.tries)


class SessionGoneError(Exception):
    """The session has expired meanwhile."""


def _without(session: Session | None, done: list[_Done]) -> Session:
    if session is None:
        raise SessionGoneError
    places = session.places
    for each in done:
        places = erased(places, each.run, each.seen)
    return replace(session, places=places)


async def ask_forget(
    replica: Replica,
    owner: tuple[str, str],
    *,
    hints_secret: str | None,
    spans: Sequence[str] = (ANYTHING,),
    prove: ProvePayload | None = None,
) -> TurnRecord | None:
    """Ask an engine to forget, and return its record; None if it doesn't confirm the forget.

    Args:
        owner: tenant and session.
        spans: names in the engine's ledger.
        prove: the demand for a proof, if any.

    Raises:
        ProxyError: the engine can't be reached, or refuses the request.
    """
    capability = replica.status.capability
    if capability is None:
        return None
    tenant, session = owner
    message_id = f"m-{uuid4().hex}"
    payload = EditPayload(
        session=session, scope=tenant, turn=f"e-{uuid4().hex[:12]}", forget=tuple(spans)
    )
    envelope = edit_envelope(message_id, payload, prove=prove)
    if hints_secret is not None:
        envelope = sign_envelope(envelope, hints_secret)
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
            return record
    return None
