"""A TLS context that follows its files.

Files may be replaced one after the other, or all at once by a turned link, as cert-manager,
Kubernetes and spiffe-helper do. New connections take the new context; others continue with theirs.
Files that don't serve change nothing.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable

import structlog

from ..model.tls_side import TlsSide
from ..telemetry.metrics import Metrics
from .files import Signature, TlsFiles, TlsFilesError, Validity

log = structlog.get_logger("leyline.tls")


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
