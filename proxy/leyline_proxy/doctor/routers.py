"""Checks of routers: each is there, whatever it answers."""

from __future__ import annotations

import httpx

from ..settings import Settings
from ..telemetry.metrics import Metrics
from ..tls.files import TlsFilesError
from ..wiring.tls import engines_context
from .findings import Finding, fail, ok, skip
from .reaching import why_unreachable

_PATH = "/health"


def routers_of(settings: Settings) -> dict[str, str]:
    """Return the router of each engine that has one, by the engine's name."""
    found = {name: own.router or settings.router for name, own in settings.engines().items()}
    return {name: url for name, url in found.items() if url is not None}


async def examine_router(settings: Settings, name: str, limit_s: float) -> list[Finding]:
    """Check that requests to an engine have a router that takes them."""
    found, url = f"upstream.{name}.router", routers_of(settings)[name]
    try:
        tls = engines_context(settings, Metrics())
    except TlsFilesError:
        return [skip(found, "its certificates' files can't serve (tls)")]
    asked = httpx.URL(url)
    place = f"{asked.scheme}://{asked.netloc.decode().rpartition('@')[2]}"
    verify = tls() if tls is not None else True
    async with httpx.AsyncClient(timeout=limit_s, trust_env=False, verify=verify) as http:
        try:
            async with http.stream("GET", url.rstrip("/") + _PATH) as answer:
                pass  # the status is enough
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem, fix = why_unreachable(error, "the router")
            return [fail(found, f"{place}: {problem}", fix)]
    return [ok(found, f"{place} answers (status {answer.status_code})")]
