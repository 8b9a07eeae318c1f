"""``/metrics``, and the state that is observed only for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.responses import Response

from ..telemetry.exposition import exposition, leave
from ..upstream.embedded import embedded_metrics
from ..wiring.services import Services

_PAUSE_S = 5.0
"""Seconds between observations if another process may answer the next scrape."""


async def metrics_response(services: Services, headers: Mapping[str, str]) -> Response:
    """Return Prometheus metrics, in the form that a request's headers ask for.

    Raises:
        QueueFullError, QueueTimeoutError: too many ask for them.
    """
    async with services.scrapes.place(""):
        await _observe(services)
        asked = exposition(headers)
        text = asked.text(services.metrics.registry)
        # A folder that processes share already holds an embedded engine's metrics.
        if not services.metrics.shared:
            text = asked.joined([text, await embedded_metrics(services.pool, asked.accept)])
    body, answer_headers = await asyncio.to_thread(asked.answer, text)
    return Response(body, headers=answer_headers)


async def keep_observing(services: Services) -> None:
    """Publish this process's state until cancelled, if several processes share their metrics.

    A scrape of any of them then shows it.
    """
    try:
        while services.metrics.shared:
            await _observe(services)
            await asyncio.sleep(_PAUSE_S)
    finally:
        leave()


async def _observe(services: Services) -> None:
    metrics = services.metrics
    metrics.observe()
    await services.budgets.observe()
    metrics.erasures_owed.set(services.erasures.waiting)
    metrics.erasures_unsaved.set(services.erasures.debts.unsaved)
    metrics.sessions.set(await services.store.count())
    tokens = services.tenants.tokens
    metrics.identity_keys_age.set((tokens.keys.age_s or 0.0) if tokens is not None else 0.0)
    metrics.session_store_up.set(services.store.problem is None)
    metrics.audit_up.set(services.audit.problem is None)
    if services.recall is not None:
        metrics.recall_store_up.set(services.recall.problem is None)
        metrics.recall_store_entries.set(services.recall.usage.entries)
        metrics.recall_store_bytes.set(services.recall.usage.bytes)
        metrics.recall_forgets_owed.set(services.recall.owed)
