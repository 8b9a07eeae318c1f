"""TLS contexts from files, for connections from clients and to engines. They follow their files.

Files may be replaced one after the other, or all at once by a turned link, as cert-manager,
Kubernetes and spiffe-helper do. New connections take the new context; others continue with theirs.
Files that don't serve change nothing.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import httpx
import structlog

from ..model.tls import TlsSide
from ..telemetry.metrics import Metrics
from .files import Signature, TlsFiles, TlsFilesError, Validity, read
from .peers import checked_peer, matches, names_of
from .refusing import RefusingContext

log = structlog.get_logger("leyline.tls")
_PROTOCOLS = ["http/1.1"]


class ReloadedContext:
    """The latest good context of one side.

    Args:
        build: makes a context of the files; raises TlsFilesError.
        interval_s: time between two looks at the files.
        now: returns seconds since 1970.

    Raises:
        TlsFilesError: the files don't serve now.
    """

    def __init__(
        self,
        side: TlsSide,
        files: TlsFiles,
        build: Callable[[TlsFiles], ssl.SSLContext],
        metrics: Metrics,
        *,
        interval_s: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._side = side
        self._files = files
        self._build = build
        self._metrics = metrics
        self._interval_s = interval_s
        self._now = now
        self._signature = files.signature()
        self._context, self.validity = build(files), files.validity()
        self._refusal: str | None = None
        """The reason that the present files aren't in force; None if they are."""
        self._reported: str | None = None
        self._publish()

    @property
    def problem(self) -> str | None:
        """The reason that the present files aren't in force, or that peers refuse them; None if
        all is well."""
        return self._refusal or self._out_of_time()

    def __call__(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        return self._context

    async def run(self) -> None:
        """Look at the files at intervals, until cancelled."""
        while True:
            self._report()
            await asyncio.sleep(self._interval_s)
            await self.refresh()

    async def refresh(self) -> bool:
        """Read the files if they have changed; return True if they are now in force."""
        signature = await asyncio.to_thread(self._files.signature)
        if signature == self._signature:
            return False
        try:
            context, validity = await asyncio.to_thread(self._read)
        except TlsFilesError as error:
            self._refused(signature, str(error))
            return False
        self._signature = signature
        self._context, self.validity, self._refusal = context, validity, None
        self._metrics.tls_reloads.labels(self._side.value, "loaded").inc()
        self._publish()
        log.info("tls_loaded", side=self._side.value)
        return True

    def _read(self) -> tuple[ssl.SSLContext, Validity | None]:
        context, validity = self._build(self._files), self._files.validity()
        before, now = self.validity, self._now()
        if validity is not None and validity.ends < now and before and before.ends > now:
            raise TlsFilesError(
                f"{self._files.settings[0]} {self._files.certificate} has expired; the one before "
                "it has not."
            )
        return context, validity

    def _refused(self, signature: Signature, problem: str) -> None:
        self._signature, self._refusal = signature, problem
        self._metrics.tls_reloads.labels(self._side.value, "refused").inc()
        log.error("tls_refused", side=self._side.value, problem=problem)

    def _out_of_time(self) -> str | None:
        fault = self.validity.fault(self._now()) if self.validity is not None else None
        if fault is None:
            return None
        named = f"{self._files.settings[0]} {self._files.certificate}"
        return f"{named} {fault}. Renew it, or correct this machine's clock."

    def _report(self) -> None:
        """Log once that peers refuse the certificate."""
        problem = self._out_of_time()
        if problem is not None and problem != self._reported:
            log.error("tls_not_valid", side=self._side.value, problem=problem)
        self._reported = problem

    def _publish(self) -> None:
        if self.validity is None:
            return
        side = self._side.value
        self._metrics.tls_begins.labels(side).set(self.validity.begins)
        self._metrics.tls_ends.labels(side).set(self.validity.ends)


def for_clients(files: TlsFiles, *, required: bool) -> ssl.SSLContext:
    """Return the context of a port.

    Args:
        required: True to refuse connections without a client's certificate. Without authorities,
            no certificate is asked for.

    Raises:
        TlsFilesError: a file can't serve.
    """
    context = RefusingContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_PROTOCOLS)
    _load_own(context, files)
    if files.authorities is not None:
        _load_authorities(context, files.authorities, files.settings[2])
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        # A resumed session's certificate isn't verified again. See also RefusingContext.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def for_engines(files: TlsFiles, *, names: Sequence[str] = ()) -> ssl.SSLContext:
    """Return the context of connections to engines.

    Args:
        files: without authorities, those that httpx trusts by default are.
        names: patterns (:func:`~.names.matches`) of which an engine's certificate must fit one, in
            place of its host name; empty for the host name.

    Raises:
        TlsFilesError: a file can't serve.
    """
    if files.authorities is None:
        context = httpx.create_ssl_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_authorities(context, files.authorities, files.settings[2])
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_PROTOCOLS)
    if files.certificate is not None:
        _load_own(context, files)
    if names:
        # Workload certificates have no host names.
        context.check_hostname = False
        context.sslobject_class = _named_peer(tuple(names))
    return context


def _load_own(context: ssl.SSLContext, files: TlsFiles) -> None:
    certificate, key = files.certificate, files.key
    if certificate is None or key is None:
        raise TlsFilesError(f"{files.settings[0]} and {files.settings[1]} need each other.")

    def encrypted() -> NoReturn:
        raise TlsFilesError(
            f"{files.settings[1]} {key} is encrypted. Give the key without a passphrase, in a file "
            "that only the proxy can read."
        )

    read(certificate, files.settings[0])
    read(key, files.settings[1])
    try:
        context.load_cert_chain(certificate, key, password=encrypted)
    except (OSError, ValueError) as error:
        if isinstance(error, TlsFilesError):
            raise
        raise TlsFilesError(
            f"{files.settings[1]} {key} is not the key of {files.settings[0]} {certificate}, or "
            "one of them isn't in PEM."
        ) from error


def _load_authorities(context: ssl.SSLContext, path: Path, setting: str) -> None:
    read(path, setting)
    try:
        context.load_verify_locations(cafile=path)
    except (OSError, ValueError) as error:
        raise TlsFilesError(f"{setting} {path} holds no certificates in PEM.") from error


def _named_peer(patterns: tuple[str, ...]) -> type[ssl.SSLObject]:
    """Return connections that end the handshake with a peer of another name."""

    def check(connection: ssl.SSLObject) -> None:
        certificate: Any = connection.getpeercert()
        names = names_of(certificate)
        if not any(matches(pattern, name) for pattern in patterns for name in names):
            log.warning("engine_certificate_refused", names=[each[:200] for each in names])
            raise ssl.SSLCertVerificationError("its names are none of upstream_tls_names")

    return checked_peer(check)
