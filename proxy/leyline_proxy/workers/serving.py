"""One process that serves: the event loop, the garbage collector, the lines of the banner."""

from __future__ import annotations

import gc
import signal
import socket
from collections.abc import Callable
from functools import partial

from fastapi import FastAPI

from leyline_engine.contract import Capability

from ..http.admin import create_admin_app
from ..http.handshakes import Handshakes
from ..http.server import DoorOf, HandshakesOf, ProxyServer
from ..model.tls import TlsRefusal
from ..settings import Settings
from ..wiring.services import Services


def server_of(
    app: FastAPI,
    settings: Settings,
    *,
    door: DoorOf,
    admin: DoorOf | None,
    started: Callable[[], None],
    ticked: Callable[[int], None] = lambda _: None,
) -> ProxyServer:
    """Return the server of an application of :func:`~leyline_proxy.http.app.create_app`.

    Args:
        door: of the proxy's port.
        admin: of the admin port, if there is one.
        started: called once the ports can be reached.
        ticked: see :class:`~leyline_proxy.http.server.ProxyServer`.
    """
    services: Services = app.state.services
    return ProxyServer(
        app,
        settings,
        services.shutdown,
        door=door,
        beside=(create_admin_app(services), admin) if admin is not None else None,
        handshakes=handshakes_of(services),
        started=partial(_started, started),
        ticked=ticked,
    )


def handshakes_of(services: Services) -> HandshakesOf | None:
    """Return the TLS handshakes of a proxy's ports; None for plain HTTP."""
    tls, metrics = services.tls.clients, services.metrics
    if tls is None:
        return None

    def failed(refusal: TlsRefusal) -> None:
        metrics.tls_refused.labels(refusal.value).inc()

    return partial(Handshakes, tls, failed=failed)


def ignore_repeated_signals() -> None:
    """Let the process end well: the server stops at the first signal, and then raises it again."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


def _started(then: Callable[[], None]) -> None:
    # Exclude objects that live as long as the process from further collections.
    gc.collect()
    gc.freeze()
    # Turns create tens of thousands of lasting values and hardly any cycles.
    gc.set_threshold(20_000, 10, 50)
    then()


def url_of(sock: socket.socket, *, secure: bool = False) -> str:
    """Return the address of a socket for people."""
    host, port = sock.getsockname()[:2]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"https://{place}" if secure else f"http://{place}"


def banner_of(services: Services) -> dict[str, str]:
    """Return the facts that a start shows, by name."""
    status = services.pool.first.status
    splices = "yes" if status.splices else f"no: {status.obstacle}"
    return {
        "model": ", ".join(status.models or ()) or "not known yet",
        "engine": status.engine if status.up else "not reached yet; still trying",
        "splices": splices,
        "capability": _capability(status.capability),
        "compactions": services.compactions.key_origin,
    }


def _capability(capability: Capability | None) -> str:
    """Return the most important facts of the handshake; doctor prints all of them."""
    if capability is None:
        return "none: presumably an ordinary OpenAI-compatible server"
    facts = [capability.architecture, f"context {capability.max_context:,} tokens"]
    if capability.kv is not None:
        kv = capability.kv
        facts.append(f"KV {kv.pool_class} {kv.dtype}, {kv.capacity_tokens:,} slots")
    if capability.rotary is not None:
        facts.append(f"rotary {capability.rotary.rope_type}, {capability.rotary.pairing}")
    return "; ".join(facts)
