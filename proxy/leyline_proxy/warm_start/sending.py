"""The replay of runs into one new engine, bounded by tokens and time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import structlog

from leyline_engine.contract import (
    EditPayload,
    Envelope,
    ReuseMode,
    ReusePayload,
    edit_envelope,
    sign_envelope,
)

from ..errors import ProxyError
from ..model.session import Session
from ..plan.planning import sink_of
from ..sessions import SessionStore
from ..settings.cache_scope import MEMBER
from ..telemetry.logging import frames_of
from ..telemetry.metrics import Metrics
from ..tenants import Tenant, TenantDirectory
from ..turns.erasure import Erasures
from ..turns.placing import Placing
from ..upstream.client import read
from ..upstream.handshake import UpstreamStatus
from ..upstream.pool import ReplicaPool
from ..upstream.rendezvous import ranked
from ..upstream.replica import Replica
from .book import RunBook
from .runs import EngineIdentity, Outcome, Run
from .selection import Selected, select


def replay_body(
    run: Run, tenant: Tenant, status: UpstreamStatus, secret: str | None
) -> dict[str, Any]:
    """Return the completion request that computes a run's KV, under the name of its session.

    Args:
        secret: shared with the engine.
    """
    body: dict[str, Any] = {
        "model": run.identity.model,
        "prompt": run.tokens.tolist(),
        "max_tokens": 1,
        "temperature": 0,
        "custom_params": {"kv_hints": msgspec.to_builtins(_envelope(run, tenant, status, secret))},
    }
    if tenant.cache_salt is not None:
        body[MEMBER] = tenant.cache_salt
    return body


def _envelope(run: Run, tenant: Tenant, status: UpstreamStatus, secret: str | None) -> Envelope:
    payload = EditPayload(
        session=run.session,
        scope=run.tenant,
        turn=f"warm-{uuid4().hex[:12]}",
        spans=run.spans,
        sink=sink_of(status),
    )
    reuses = status.capability is not None and status.capability.reuses
    # The engine indexes only content whose tenant asks for reuse.
    asks = tenant.reuse != "off" and reuses and status.splices
    reuse = ReusePayload(mode=ReuseMode.OBSERVE) if asks else None
    if reuse is None and tenant.recall and status.reuses_within:
        reuse = ReusePayload(mode=ReuseMode.LIVE, within=(), own=True)
    envelope = edit_envelope(f"m-{uuid4().hex}", payload, reuse=reuse)
    return envelope if secret is None else sign_envelope(envelope, secret)


log = structlog.get_logger("leyline.warm_start")

_AT_ONCE = 2
_MAX_FAILURES = 3
"""Number of failures in a row after which the engine gets no more."""

_POOL_SHARE = 0.75
"""Part of an engine's pool that a warm start may fill: the rest is for the first requests."""

_PATH = "/v1/completions"
_JSON = [(b"content-type", b"application/json")]


class SessionMovedError(Exception):
    """The session has expired, or demanded a forget meanwhile."""


@dataclass(slots=True)
class _Work:
    """One warm start under way."""

    replica: Replica
    status: UpstreamStatus
    deadline: float
    queue: Iterator[Run]
    results: Counter[Outcome]
    failures: int = 0
    tokens: int = 0

    @property
    def goes_on(self) -> bool:
        """True if the engine is the one that it was, and answers."""
        now = self.replica.status
        same = now.up and now.retains_as == self.status.retains_as
        return same and self.failures < _MAX_FAILURES


class Replayer:
    """Replays runs into engines.

    Args:
        tokens: of one engine.
        seconds: of one engine.
        ttl_s: age above which a run isn't replayed.
        alone: True if no other proxy knows this one's sessions.
    """

    def __init__(
        self,
        book: RunBook,
        *,
        pool: ReplicaPool,
        store: SessionStore,
        erasures: Erasures,
        tenants: TenantDirectory,
        metrics: Metrics,
        hints_secret: str | None,
        tokens: int,
        seconds: float,
        ttl_s: float,
        alone: bool,
    ) -> None:
        self._book = book
        self._pool = pool
        self._store = store
        self._erasures = erasures
        self._tenants = tenants
        self._metrics = metrics
        self._placing = Placing(pool)
        self._hints_secret = hints_secret
        self._tokens = tokens
        self._seconds = seconds
        self._ttl_s = ttl_s
        self._alone = alone
        self._tasks: set[asyncio.Task[None]] = set()

    async def warm(self, replica: Replica) -> None:
        """Replay the runs that an engine should have. Never raises; in the end it counts as ready
        in any case."""
        status, began = replica.status, time.monotonic()
        results: Counter[Outcome] = Counter()
        work = _Work(replica, status, began + self._seconds, iter(()), results)
        try:
            await self._warm(work)
        except Exception as error:  # a cold cache is better than no engine
            log.error("warm_start_failed", error=type(error).__name__, frames=frames_of(error))
        finally:
            replica.warmed = status.retains_as
        for outcome, count in results.items():
            self._metrics.warm_start_runs.labels(outcome).inc(count)
        self._metrics.warm_start_tokens.inc(work.tokens)
        if results:
            log.info(
                "warm_start_ended",
                upstream=replica.name,
                tokens=work.tokens,
                ms=round((time.monotonic() - began) * 1000),
                **{outcome.value: count for outcome, count in results.items()},
            )

    async def _warm(self, work: _Work) -> None:
        found = self._candidates(work)
        chosen = await asyncio.to_thread(self._select, found, work.status)
        if chosen.left:
            work.results[Outcome.OVER_TOKENS] = len(chosen.left)
        if not chosen.runs:
            return
        log.info(
            "warm_start_began",
            upstream=work.replica.name,
            runs=len(chosen.runs),
            tokens=chosen.tokens,
        )
        work.queue = iter(chosen.runs)
        before = work.results.total()
        await self._send_all(work)
        rest = len(chosen.runs) - (work.results.total() - before)
        if rest:
            late = time.monotonic() >= work.deadline
            work.results[Outcome.OVER_TIME if late else Outcome.ENGINE_FAILED] += rest

    def _select(self, runs: list[Run], status: UpstreamStatus) -> Selected:
        capability = status.capability
        if capability is None:
            return Selected((), (), 0)
        kv = capability.kv
        room = int(kv.capacity_tokens * _POOL_SHARE) if kv is not None else self._tokens
        return select(runs, min(self._tokens, room), capability.max_context - 1)

    def _candidates(self, work: _Work) -> list[Run]:
        """Return the runs that may be replayed; count the others."""
        found: list[Run] = []
        capability = work.status.capability
        if capability is None:
            return found
        identity = EngineIdentity(
            capability.model, capability.model_fingerprint, work.status.rendering.fingerprint
        )
        for run in tuple(self._book):
            if run.identity.model != identity.model:
                continue
            outcome = self._obstacle(run, identity, work)
            if outcome is None:
                found.append(run)
            else:
                work.results[outcome] += 1
        return found

    def _obstacle(self, run: Run, identity: EngineIdentity, work: _Work) -> Outcome | None:
        """Return the reason that a run isn't replayed; None if it is."""
        tenant = self._tenants.get(run.tenant)
        if tenant is None:
            return Outcome.OTHER_TENANT
        reasons = {
            Outcome.SWITCHED_OFF: not tenant.warm_start,
            Outcome.EXPIRED: run.at < time.time() - self._ttl_s,
            Outcome.OTHER_MODEL: run.identity.fingerprint != identity.fingerprint,
            Outcome.OTHER_TOKENIZER: run.identity.tokenizer != identity.tokenizer,
            Outcome.PRESENT: run.engine == work.status.retains_as,
            Outcome.ELSEWHERE: not self._at_home(run, tenant, work),
        }
        return next((outcome for outcome, holds in reasons.items() if holds), None)

    def _at_home(self, run: Run, tenant: Tenant, work: _Work) -> bool:
        """Return True if the session's next turn will go to this engine once it is ready."""
        capability = work.status.capability
        if tenant.cache_salt is not None and not (capability and capability.isolates):
            return False  # it gets no request of this tenant
        weights = {
            each.name: each.weight
            for each in self._pool
            if (tenant.upstreams is None or each.name in tenant.upstreams)
            and (each.status.up or not each.handshake.asked)
            and not each.draining
            and each.status.serves(run.identity.model)
        }
        return bool(weights) and ranked(run.session, weights)[0] == work.replica.name

    async def _send_all(self, work: _Work) -> None:
        tasks = {asyncio.create_task(self._send_some(work)) for _ in range(_AT_ONCE)}
        self._tasks |= tasks
        for task in tasks:
            task.add_done_callback(self._ended)
        try:
            await asyncio.wait(tasks, timeout=max(0.0, work.deadline - time.monotonic()))
        finally:
            # Nobody waits for the end: a connection may take its time to close.
            for task in tasks:
                task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("warm_start_failed", error=type(error).__name__, frames=frames_of(error))

    async def aclose(self) -> None:
        """Wait for requests that were given up."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _send_some(self, work: _Work) -> None:
        for run in work.queue:
            if not work.goes_on:
                return
            outcome = await self._send(run, work)
            work.results[outcome] += 1
            work.failures = work.failures + 1 if outcome is Outcome.ENGINE_FAILED else 0

    async def _send(self, run: Run, work: _Work) -> Outcome:
        tenant, engine = self._tenants.get(run.tenant), work.status.retains_as
        if tenant is None:
            return Outcome.OTHER_TENANT
        forget = self._book.last_forget(run.owner)
        obstacle = self._news_of(run, engine) or await self._announce(
            run, engine, work.replica.name
        )
        if obstacle is not None:
            return obstacle
        if self._book.last_forget(run.owner) is not forget:
            return Outcome.FORGOTTEN
        try:
            done = await self._prefill(run, tenant, work)
        finally:
            forgot = self._book.last_forget(run.owner) is not forget
            if forgot:
                # It may have reached the engine before the run did.
                self._erasures.owe(*run.owner, engine, work.replica.name)
        if forgot:
            return Outcome.FORGOTTEN
        if await self._overtaken(run):
            self._erasures.owe(*run.owner, engine, work.replica.name)
            return Outcome.FORGOTTEN
        if done:
            work.tokens += len(run.tokens)
            self._book.replayed(run, engine)
        return Outcome.REPLAYED if done else Outcome.ENGINE_FAILED

    def _news_of(self, run: Run, engine: str) -> Outcome | None:
        """Return the reason that a run isn't its session's latest any more; None if it is."""
        known = self._book.get(run.owner)
        if known is None:
            return Outcome.FORGOTTEN
        if known.at == run.at:
            return None
        return Outcome.PRESENT if known.engine == engine else Outcome.ELSEWHERE

    async def _announce(self, run: Run, engine: str, replica: str) -> Outcome | None:
        """Record in the session that the engine may hold its KV, so that any forget goes there.

        Returns:
            The reason that the run must not be replayed; None if it may.
        """
        session = await self._store.get(*run.owner)
        if self._store.problem is not None:
            return Outcome.UNKNOWN_SESSION
        if session is None:
            # A name that comes back is forgotten whole, wherever it may have been. No forget finds
            # any other session, nor one of which other proxies may have known more.
            return None if run.named and self._alone else Outcome.UNKNOWN_SESSION

        def change(found: Session | None) -> Session:
            if found is None or not _is_as_kept(found, run):
                raise SessionMovedError
            placed = self._placing.begun(found, engine, replica)
            if placed.places[engine].owed:
                raise SessionMovedError
            return placed

        try:
            await self._store.update(*run.owner, change)
        except SessionMovedError:
            return Outcome.FORGOTTEN
        return Outcome.UNKNOWN_SESSION if self._store.problem is not None else None

    async def _overtaken(self, run: Run) -> bool:
        """Return True if the session has demanded a forget since the run was kept."""
        session = await self._store.get(*run.owner)
        return session is not None and not _is_as_kept(session, run)

    async def _prefill(self, run: Run, tenant: Tenant, work: _Work) -> bool:
        body = replay_body(run, tenant, work.status, self._hints_secret)
        left_s = max(0.1, work.deadline - time.monotonic())
        try:
            async with work.replica.client.open(
                "POST", _PATH, headers=_JSON, content=msgspec.json.encode(body), timeout_s=left_s
            ) as response:
                await read(response)
                return response.status_code == httpx.codes.OK
        except ProxyError:
            work.replica.handshake.report_failure()
            return False


def _is_as_kept(session: Session, run: Run) -> bool:
    """Return True if the session has demanded no forget since the run was kept."""
    return (session.created, session.demands) == (run.since, run.demands)
