"""Checks of the certificates: those of the proxy's ports, and those that engines see."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..settings import Settings
from ..telemetry.metrics import Metrics
from ..tls.contexts import ReloadedContext
from ..tls.files import TlsFilesError
from ..wiring.tls import clients_context, engines_context
from .configured import strangers
from .findings import Finding, fail, ok, skip, warn

_NAME = "tls"
NOT_RENEWED = 0.2
"""Share of a lifetime that is left when something should have renewed the certificate."""
_DAY_S = 86_400
MOST_S = 14 * _DAY_S
"""Longest such time, for certificates of a year; both as in the alert
LeylineCertificateNotRenewed."""


def examine_tls(settings: Settings) -> list[Finding]:
    """Check that the files serve, and for how long yet."""
    if settings.tls_cert is None and not settings.secures_upstreams:
        return [skip(_NAME, "callers use plain HTTP (tls_cert), engines the system's authorities")]
    sides: dict[str, Callable[[Settings, Metrics], ReloadedContext | None]] = {
        "tls_cert": clients_context,
        "upstream_tls_cert": engines_context,
    }
    found = [_side(setting, build, settings) for setting, build in sides.items()]
    others = (_in_the_clear(settings), strangers(_NAME, "tls_tenants", settings))
    return [each for each in (*found, *others) if each is not None]


def _side(
    setting: str, build: Callable[[Settings, Metrics], ReloadedContext | None], settings: Settings
) -> Finding | None:
    try:
        context = build(settings, Metrics())
    except TlsFilesError as error:
        return fail(_NAME, str(error), "correct the file; the proxy doesn't start with this one")
    if context is None:
        return None
    if context.validity is None:
        return ok(_NAME, "engines are checked by upstream_tls_ca; the proxy shows no certificate")
    path, now = getattr(settings, setting), time.time()
    begins, ends = context.validity.begins, context.validity.ends
    left = f"{(ends - now) / _DAY_S:.1f} days"
    if (fault := context.validity.fault(now)) is not None:
        return fail(_NAME, f"{setting} {path} {fault}", "renew it, or correct this machine's clock")
    if ends - now < min(MOST_S, NOT_RENEWED * (ends - begins)):
        return warn(
            _NAME,
            f"{setting} {path} expires in {left}: less than a fifth of its lifetime, or 14 days",
            "see why it wasn't renewed: cert-manager and SPIRE do it earlier",
        )
    return ok(_NAME, f"{setting} {path} serves for another {left}")


def _in_the_clear(settings: Settings) -> Finding | None:
    """Return a warning about engines that the settings for TLS don't reach; None if there are
    none."""
    if not settings.secures_upstreams:
        return None
    ways = {name: (each.url, each.router) for name, each in settings.engines().items()}
    plain = [
        name
        for name, urls in ways.items()
        if any(url is not None and url.startswith("http://") for url in (*urls, settings.router))
    ]
    if not plain:
        return None
    return warn(
        _NAME,
        f"requests to {', '.join(plain)} go over plain HTTP, in spite of upstream_tls_*",
        "give https:// in upstreams and router",
    )
