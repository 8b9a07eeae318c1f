"""The TLS contexts of the settings."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ..model.tls import TlsSide
from ..settings import Settings
from ..telemetry.metrics import Metrics
from ..tls.contexts import ReloadedContext, for_clients, for_engines
from ..tls.files import TlsFiles

_Side = tuple[TlsFiles, Callable[[TlsFiles], ssl.SSLContext]]
"""The files of one side, and the function that makes a context of them."""


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """The contexts of a proxy; None for plain HTTP, and for engines for httpx's own."""

    clients: ReloadedContext | None = None
    engines: ReloadedContext | None = None

    def __iter__(self) -> Iterator[ReloadedContext]:
        return (each for each in (self.clients, self.engines) if each is not None)

    @property
    def problem(self) -> str | None:
        """The reason that files aren't in force; None if all are."""
        return next((each.problem for each in self if each.problem is not None), None)

    async def refresh(self) -> bool:
        """Read files that have changed; return True if any is now in force."""
        return any([await each.refresh() for each in self])


def build_tls(settings: Settings, metrics: Metrics) -> TlsContexts:
    """Return the contexts, from files that are read now.

    Raises:
        TlsFilesError: a file can't serve.
    """
    return TlsContexts(clients_context(settings, metrics), engines_context(settings, metrics))


def check_tls(settings: Settings) -> None:
    """Read the files once. Raises as :func:`build_tls`."""
    for side in (_clients_side(settings), _engines_side(settings)):
        if side is not None:
            files, build = side
            build(files)
            files.validity()


def clients_context(settings: Settings, metrics: Metrics) -> ReloadedContext | None:
    """Return the context of the proxy's ports; None for plain HTTP. Raises as :func:`build_tls`."""
    return _context(TlsSide.CLIENTS, _clients_side(settings), settings, metrics)


def engines_context(settings: Settings, metrics: Metrics) -> ReloadedContext | None:
    """Return the context of connections to engines and routers; None for httpx's own. Raises as
    :func:`build_tls`."""
    return _context(TlsSide.ENGINES, _engines_side(settings), settings, metrics)


def _context(
    side: TlsSide, found: _Side | None, settings: Settings, metrics: Metrics
) -> ReloadedContext | None:
    if found is None:
        return None
    files, build = found
    return ReloadedContext(side, files, build, metrics, interval_s=settings.tls_reload_s)


def _clients_side(settings: Settings) -> _Side | None:
    if settings.tls_cert is None:
        return None
    files = TlsFiles(
        settings.tls_cert,
        settings.tls_key,
        settings.tls_client_ca,
        ("tls_cert", "tls_key", "tls_client_ca"),
    )
    return files, partial(for_clients, required=settings.tls_clients != "optional")


def _engines_side(settings: Settings) -> _Side | None:
    if not settings.secures_upstreams:
        return None
    files = TlsFiles(
        settings.upstream_tls_cert,
        settings.upstream_tls_key,
        settings.upstream_tls_ca,
        ("upstream_tls_cert", "upstream_tls_key", "upstream_tls_ca"),
    )
    return files, partial(for_engines, names=settings.upstream_tls_names)
