"""Replicas of a pool over ASGI applications that a test writes."""

from __future__ import annotations

from typing import Any

from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.upstream.breaker import Breaker
from leyline_proxy.upstream.client import UpstreamClient
from leyline_proxy.upstream.embedded import ASGIStreamTransport
from leyline_proxy.upstream.handshake import Handshake
from leyline_proxy.upstream.link import Link
from leyline_proxy.upstream.replica import Replica


def replica_over(
    app: Any, name: str = "e", *, metrics: Metrics | None = None, breaker: Breaker | None = None
) -> Replica:
    """A replica whose engine is ``app``; it is asked for its capability when a test says so."""
    client = UpstreamClient(Link(f"http://{name}", ASGIStreamTransport(app)), api_key=None)
    shake = Handshake(
        client, metrics or Metrics(), name=name, splice=True, interval_s=60, retry_s=60
    )
    return Replica(name, client, shake, breaker or Breaker())
