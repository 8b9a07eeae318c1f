"""The other setting of ``reasoning_edits``: what a running proxy has counted of it."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ..bounded_body import BodyTooLongError, bounded_body
from ..settings import Settings, secret_of
from .findings import Finding, ok, skip, warn
from .own_proxy import client_for, origin_of

NAME = "reasoning-edits"
_SERIES = "leyline_reasoning_edit_tokens_total"
_MOST_BYTES = 16 * 1024 * 1024


async def examine_reasoning(settings: Settings) -> list[Finding]:
    """Return the tokens that the other setting would have saved or kept exact."""
    host, port = settings.host, settings.port
    headers: dict[str, str] = {}
    if settings.metrics_on_admin and settings.admin_port is not None:
        host, port = settings.admin_host, settings.admin_port
        key = secret_of(settings.admin_key) or ""
        if key.startswith("sha256:"):
            return [skip(NAME, "the admin port has the metrics, and its key isn't known")]
        headers["authorization"] = f"Bearer {key}"
    if not port:
        return [skip(NAME, "the port of a running proxy isn't known (--port)")]
    text = await _metrics(client_for(settings, origin_of(settings, host, port), headers=headers))
    if text is None:
        return [skip(NAME, f"no proxy on {host}:{port} shows metrics")]
    return [verdict(effects_in(text), settings.reasoning_edits)]


def effects_in(text: str) -> dict[str, int]:
    """Return the tokens kept and lost after stripped thinking, from a proxy's metrics.

    Raises:
        ValueError: these are no metrics.
    """
    found = {"kept": 0, "lost": 0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == _SERIES and sample.labels.get("effect") in found:
                found[sample.labels["effect"]] += int(sample.value)
    return found


def told(effects: Mapping[str, int]) -> str:
    """Return the figures as a sentence."""
    parts = []
    if effects["kept"]:
        parts.append(
            f"amortize copied {effects['kept']:,} tokens after stripped thinking, which exact "
            "would have prefilled"
        )
    if effects["lost"]:
        parts.append(
            f"exact prefilled {effects['lost']:,} tokens after stripped thinking, which amortize "
            "would have copied"
        )
    return "; ".join(parts) or "no template has stripped thinking so far"


def verdict(effects: Mapping[str, int], mode: str) -> Finding:
    """Return the finding for the figures under a setting."""
    if mode == "amortize" and effects["lost"] > effects["kept"]:
        return warn(
            NAME,
            told(effects),
            "Most such edits were exact although reasoning_edits is amortize: have agents send "
            "x-leyline-session, and look for tenants, requests or a profile that say exact.",
        )
    return ok(NAME, told(effects))


async def _metrics(proxy: httpx.AsyncClient) -> str | None:
    """Return a proxy's metrics; None if there are none."""
    try:
        async with proxy as client, client.stream("GET", "/metrics") as response:
            found = await bounded_body(response, _MOST_BYTES)
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, BodyTooLongError):
        return None
    text = found.decode(errors="replace")
    return text if response.status_code == httpx.codes.OK and "leyline_" in text else None
