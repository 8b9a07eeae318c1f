"""The engines of the settings, as replicas; nothing is connected yet."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from starlette.types import ASGIApp

from leyline_engine.contract import FidelityProfile, read_profiles

from ..settings import ONLY_ENGINE, Settings, UpstreamSettings, secret_of
from ..telemetry.metrics import Metrics
from ..upstream.affinity import reserved_headers
from ..upstream.aiohttp_transport import AiohttpTransport
from ..upstream.breaker import Breaker, BreakerState
from ..upstream.client import AnswerBounds, UpstreamClient
from ..upstream.embedded import EMBEDDED_BASE_URL, ASGIStreamTransport
from ..upstream.handshake import Handshake
from ..upstream.link import Link
from ..upstream.pool import ReplicaPool
from ..upstream.records import RecordRoute
from ..upstream.replica import Replica

_SIDE_CONNECTIONS = 64
"""Connections for documents and commands that callers' requests need."""

_RECORD_CONNECTIONS = 32
_HANDSHAKE_CONNECTIONS = 4
"""Separate connections: hanging requests must not make the engine look dead."""


def build_pool(
    settings: Settings,
    engine_app: ASGIApp | None,
    metrics: Metrics,
    engine_socket: Path | None = None,
    tls: Callable[[], ssl.SSLContext] | None = None,
) -> ReplicaPool:
    """Return all engines.

    Args:
        engine_app: one in this process, which then is the only one.
        engine_socket: Unix socket of one in a process beside, which then is the only one.
        tls: returns the context for a new connection; None for httpx's own.

    Raises:
        ValueError: there is none, or ``fidelity_profile`` is no file of profiles.
    """
    engines = settings.engines()
    if engine_app is not None or engine_socket is not None:
        engines = {ONLY_ENGINE: UpstreamSettings(url=EMBEDDED_BASE_URL)}
    if not engines:
        raise ValueError("set upstream to the engine's URL, or pass an embedded engine")
    path = settings.fidelity_profile
    profiles = read_profiles(path) if path is not None else ()
    way = _Way(engine_app, engine_socket, tls)
    replicas = [
        _replica(name, each, settings, way, metrics=metrics, profiles=profiles)
        for name, each in engines.items()
    ]
    for replica in replicas:
        metrics.watch_replica(
            replica.name,
            running=partial(getattr, replica, "running"),
            circuit_open=partial(_circuit_open, replica),
        )
    return ReplicaPool(replicas)


@dataclass(frozen=True, slots=True)
class _Way:
    """The way to engines: on this machine one may be reached otherwise than over TCP."""

    app: ASGIApp | None
    socket: Path | None
    tls: Callable[[], ssl.SSLContext] | None

    def transport(self, connections: int) -> AiohttpTransport:
        """Return connections to an engine, wherever it is."""
        return AiohttpTransport(max_connections=connections, socket=self.socket, tls=self.tls)


def _replica(
    name: str,
    own: UpstreamSettings,
    settings: Settings,
    way: _Way,
    *,
    metrics: Metrics,
    profiles: Sequence[FidelityProfile],
) -> Replica:
    api_key = secret_of(own.api_key or settings.upstream_api_key)
    router = own.router or settings.router

    def caller(url: str, side: Link | None, peer: str = "engine") -> UpstreamClient:
        """Return a client for callers' requests."""
        return UpstreamClient(
            _link(url, settings, way),
            api_key=api_key,
            side=side,
            reserved=reserved_headers(settings.affinity_header, routed=router is not None),
            hints_secret=secret_of(settings.hints_secret),
            idle_timeout_s=settings.idle_timeout_s,
            bounds=AnswerBounds(settings.max_answer_bytes, settings.max_event_bytes),
            peer=peer,
        )

    client = caller(
        own.url, _side_link(own.url, way, _SIDE_CONNECTIONS) if way.app is None else None
    )

    def apart(connections: int) -> UpstreamClient:
        """Return a client for small requests, on its own connections."""
        if way.app is not None:
            return client
        return UpstreamClient(_side_link(own.url, way, connections), api_key=api_key)

    handshake = Handshake(
        apart(_HANDSHAKE_CONNECTIONS),
        metrics,
        name=name,
        # Each engine may have its own template and tokenizer.
        text_memory_bytes=settings.text_memory_bytes * 7 // 8 // max(1, len(settings.engines())),
        splice=settings.splice,
        profiles=profiles,
        interval_s=settings.handshake_interval_s,
        retry_s=settings.handshake_retry_s,
    )
    return Replica(
        name,
        client,
        handshake,
        Breaker(),
        weight=own.weight,
        apis=frozenset(f"/v1/{api}" for api in own.apis),
        records=_records(name, apart(_RECORD_CONNECTIONS), settings, metrics),
        router=caller(router, None, "router") if router is not None else None,
    )


def _records(
    name: str, client: UpstreamClient, settings: Settings, metrics: Metrics
) -> RecordRoute:
    return RecordRoute(
        client,
        Breaker(),
        budget_s=settings.receipt_timeout_s,
        count=lambda came: metrics.receipts.labels(name, came.value).inc(),
    )


def _circuit_open(replica: Replica) -> bool:
    return replica.breaker.state is not BreakerState.CLOSED


def _link(url: str, settings: Settings, way: _Way) -> Link:
    timeout = httpx.Timeout(
        settings.first_token_timeout_s,
        connect=settings.connect_timeout_s,
        pool=settings.connect_timeout_s,
    )
    if way.app is not None:
        return Link(url, ASGIStreamTransport(way.app), timeout)
    return Link(url, way.transport(settings.max_upstream_connections), timeout)


def _side_link(url: str, way: _Way, connections: int) -> Link:
    return Link(url, way.transport(connections))
