"""One viewer's stream of server-sent events: a snapshot, then changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from leyline_engine.contract import ClaimStatus

from ..admission import AdmissionGate
from ..claims.documents import claim_document
from ..claims.watch import ClaimWatch
from ..errors import ProxyError
from ..sessions import SessionStore
from ..sessions.summary import SessionOverview, session_overview
from ..shutdown import Shutdown
from ..tenants import Tenant
from ..upstream.handshake import UpstreamStatus
from ..upstream.pool import ReplicaPool
from ..upstream.replica import Replica, replica_document
from .feed import Event, LiveFeed, Viewer, encoded
from .trend import STEP_S, Step

MAX_SESSIONS = 200
"""Largest number of sessions shown; the latest ones."""


def engine_document(replica: Replica) -> dict[str, Any]:
    """Return one engine, with its capability as readable names and values."""
    facts = [{"name": name, "value": value} for name, value in engine_facts(replica.status)]
    return replica_document(replica) | {"facts": facts}


def engine_facts(status: UpstreamStatus) -> list[tuple[str, str]]:
    """Return the engine's capability as readable names and values."""
    facts = [("Models", ", ".join(status.models) if status.models else "unknown")]
    capability = status.capability
    if capability is None:
        return facts
    facts += [
        ("Engine", capability.engine_label),
        ("Plugin", capability.plugin.version or "unknown"),
        ("Architecture", capability.architecture),
        ("Context", f"{capability.max_context:,} tokens"),
        ("Actions", ", ".join(capability.actions) or "none"),
    ]
    if capability.rotary is not None:
        rotary = capability.rotary
        facts.append(("Rotary", f"{rotary.rope_type}, {rotary.pairing}, {rotary.rotary_dim} wide"))
    if capability.kv is not None:
        kv = capability.kv
        size = f"{kv.capacity_tokens:,} tokens, {kv.layers} layers"
        facts.append(("KV cache", f"{kv.pool_class}, {kv.dtype}, {size}"))
    return facts


def claims_of(tenant: str, upstream: str, live: Iterable[ClaimStatus]) -> list[dict[str, Any]]:
    """Return the tenant's live claims on one engine, oldest first, as last seen."""
    found = []
    for status in live:
        if status.claim.tenant == tenant:
            claim = claim_document(status) | {"upstream": upstream}
            # Ages would change with every look.
            del claim["age_s"], claim["predicate"]
            found.append(claim)
    return found


def sessions_document(found: Sequence[SessionOverview]) -> dict[str, Any]:
    """Return the latest sessions, latest first, and the number of all."""
    answered = [item for item in found if item.answered]
    shown = [session_overview(item) for item in answered[:MAX_SESSIONS]]
    return {"sessions": shown, "total": len(answered)}


def trend_document(steps: Iterable[Step]) -> dict[str, Any]:
    """Return the last hour's steps."""
    return {"step_s": STEP_S, "steps": [asdict(step) for step in steps]}


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals of a stream, in seconds, for facts without events."""

    tick_s: float = 1.0
    """Longest wait before it notices the proxy's stop or an engine's change."""
    gather_s: float = 0.1
    """Events within this time are sent together."""
    heartbeat_s: float = 10.0
    """Interval of comments that keep the stream alive, and of checks of the viewer's key."""
    sessions_s: float = 15.0
    """Interval of looks at the stored sessions: others may write them, and they expire."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of a stream's content."""

    feed: LiveFeed
    store: SessionStore
    pool: ReplicaPool
    gate: AdmissionGate
    watches: Mapping[str, ClaimWatch]
    """Watches by name of the engine."""
    shutdown: Shutdown
    keyed: bool
    """True if callers need a key."""


class LiveStream:
    """The events for one viewer.

    Args:
        tenant: the viewer's.
        identify: finds the viewer's tenant again; raises ProxyError if it can't.
    """

    def __init__(
        self,
        sources: Sources,
        viewer: Viewer,
        tenant: Tenant,
        identify: Callable[[], Awaitable[Tenant]],
        pace: Pace,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._viewer = viewer
        self._identify = identify
        self._pace = pace
        self._clock = clock
        self._tenant = tenant
        self._state = b""
        self._known: dict[str, float] = {}
        """Times of the last change of the sessions that the viewer has."""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the stream until the proxy stops or the viewer's key becomes invalid."""
        if not self._viewer.behind:
            # The viewer's sessions aren't known here; the next look compares them.
            yield _event("resumed", {"now": time.time()})
        beats = looks = self._clock()
        told = float("-inf")
        while not self._sources.shutdown.begun:
            if self._viewer.behind:
                looks = self._clock()
                yield await self._snapshot()
            elif taken := self._viewer.take():
                yield b"".join(map(self._told, taken))
            now = self._clock()
            if now - told >= self._pace.tick_s:
                told = now
                yield await self._changed_state()
            if now - looks >= self._pace.sessions_s:
                looks = now
                yield await self._changed_sessions()
            if now - beats >= self._pace.heartbeat_s:
                beats = now
                if not await self._opens():
                    yield _event("bye", {"reason": "key"})
                    return
                yield b": still here\n\n"
            await self._viewer.wait(self._pace.tick_s)
            await asyncio.sleep(self._pace.gather_s)
        yield _event("bye", {"reason": "stopping"})

    async def _opens(self) -> bool:
        """Return True if the viewer's key still belongs to the tenant of its events; a key may have
        become another's."""
        try:
            tenant = await self._identify()
        except ProxyError:
            return False
        if tenant.name != self._tenant.name:
            return False
        self._tenant = tenant
        return True

    async def _snapshot(self) -> bytes:
        place = self._viewer.begin_anew()
        sources, tenant = self._sources, self._tenant
        trend = trend_document(await sources.feed.trend(tenant.name))
        found = sessions_document(await sources.store.sessions(tenant.name))
        self._know(found)
        document = {
            "version": version("leyline-kv"),
            "tenant": tenant.name,
            "keyed": sources.keyed,
            "now": time.time(),
            "heartbeat_s": self._pace.heartbeat_s,
            "trend": trend,
            **found,
        }
        return _event("snapshot", document, place)

    async def _changed_sessions(self) -> bytes:
        store = self._sources.store
        found = sessions_document(await store.sessions(self._tenant.name))
        if store.problem is not None:
            return b""  # it knows none now, but there may be some
        before = self._known
        self._know(found)
        return _event("sessions", found) if self._known != before else b""

    def _know(self, found: Mapping[str, Any]) -> None:
        self._known = {line["id"]: line["updated"] for line in found["sessions"]}

    def _told(self, event: Event) -> bytes:
        if event.updated:
            self._known[event.session] = event.updated
        return _framed(event.kind, event.data, self._viewer.id_of(event.number))

    async def _changed_state(self) -> bytes:
        """Return engines, claims and the queue if they have changed since last sent."""
        data = encoded(await self._state_document())
        if data == self._state:
            return b""
        self._state = data
        return _framed("state", data)

    async def _state_document(self) -> dict[str, Any]:
        sources, name, allowed = self._sources, self._tenant.name, self._tenant.upstreams
        replicas = [each for each in sources.pool if allowed is None or each.name in allowed]
        counts = await sources.gate.counts(name)
        live = [(each.name, sources.watches[each.name].memory.live()) for each in replicas]
        return {
            "running": counts.running,
            "waiting": counts.waiting,
            "store": {"name": sources.store.name, "problem": sources.store.problem},
            "upstreams": [engine_document(each) for each in replicas],
            "claims": list(_each(claims_of(name, at, claims) for at, claims in live)),
        }


def _each(lists: Iterable[list[dict[str, Any]]]) -> Iterable[dict[str, Any]]:
    return (item for items in lists for item in items)


def _event(kind: str, document: Any, event_id: str | None = None) -> bytes:
    return _framed(kind, encoded(document), event_id)


def _framed(kind: str, data: bytes, event_id: str | None = None) -> bytes:
    head = b"" if event_id is None else b"id: " + event_id.encode() + b"\n"
    return head + b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
