"""Checks of Prometheus: availability, scraping of a proxy, and rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from .findings import Finding, fail, ok, warn
from .reaching import document, why_unreachable

BUILD = "leyline_build_info"
"""A series that every proxy has."""
PREFIX = "leyline_"


@dataclass(frozen=True, slots=True)
class PrometheusFacts:
    """Facts about Prometheus."""

    url: str
    ready: int
    """HTTP status of its readiness."""
    proxies: int
    """Number of series of :data:`BUILD`."""
    down: Sequence[str] = ()
    """Targets of Leyline's jobs that it couldn't scrape, by their URL."""
    rules: int = 0
    """Number of rules about Leyline's series."""
    broken_rules: Sequence[str] = ()
    """Names of the rules that it can't evaluate."""


async def examine_prometheus(url: str, limit_s: float) -> list[Finding]:
    """Return all findings about one Prometheus."""
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    shown = _shown(url)
    try:
        facts = await _facts(url, shown, limit_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        problem, fix = why_unreachable(error, "Prometheus")
        return [fail("prometheus.reachable", f"{shown}: {problem}", fix)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return [_stranger(shown)]
    return verdicts(facts)


def _stranger(url: str) -> Finding:
    return fail(
        "prometheus.reachable",
        f"{url} answers, but not like Prometheus",
        "Give the URL of Prometheus itself, with its path prefix.",
    )


def verdicts(facts: PrometheusFacts) -> list[Finding]:
    """Return findings from the facts."""
    if facts.ready in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return [
            fail(
                "prometheus.reachable",
                f"{facts.url} needs a login (status {facts.ready})",
                "Put user and password into the URL: http://USER:PASSWORD@HOST:PORT.",
            )
        ]
    if facts.ready not in (httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE):
        return [_stranger(facts.url)]
    if facts.ready != httpx.codes.OK:
        return [
            fail(
                "prometheus.reachable",
                f"{facts.url} isn't ready (status {facts.ready})",
                "Wait until Prometheus has read its log, or look there for errors.",
            )
        ]
    return [ok("prometheus.reachable", f"{facts.url} is ready"), _scrapes(facts), _rules(facts)]


def _scrapes(facts: PrometheusFacts) -> Finding:
    name = "prometheus.scrapes"
    if facts.down:
        return fail(
            name,
            f"it can't scrape {', '.join(facts.down[:4])}",
            "Look up the target's error at /targets of Prometheus. With metrics_on_admin, use the "
            "port of the admin API.",
        )
    if not facts.proxies:
        return fail(
            name,
            "it has no series of a Leyline proxy",
            "Add a job that scrapes /metrics of the proxy, as in deploy/prometheus.yml.",
        )
    return ok(name, f"{facts.proxies} proxies")


def _rules(facts: PrometheusFacts) -> Finding:
    name = "prometheus.rules"
    if facts.broken_rules:
        return fail(
            name,
            f"it can't evaluate {', '.join(facts.broken_rules[:4])}",
            "Run promtool check rules FILE to see why.",
        )
    if not facts.rules:
        return warn(
            name,
            "no rule uses a series of Leyline: nobody is alerted",
            "Add the rules that come with Leyline (deploy/alerts) to rule_files.",
        )
    return ok(name, f"{facts.rules} rules")


async def _facts(url: str, shown: str, limit_s: float) -> PrometheusFacts:
    async with httpx.AsyncClient(base_url=url, timeout=limit_s) as client:
        async with client.stream("GET", "/-/ready") as ready:  # its text isn't read
            pass
        if ready.status_code != httpx.codes.OK:
            return PrometheusFacts(shown, ready.status_code, 0)
        series = await _data(client, "/api/v1/query", query=BUILD)
        targets = await _data(client, "/api/v1/targets", state="active")
        groups = (await _data(client, "/api/v1/rules"))["groups"]
    ours = [
        rule for group in groups for rule in group["rules"] if PREFIX in str(rule.get("query", ""))
    ]
    return PrometheusFacts(
        shown,
        ready.status_code,
        len(series["result"]),
        [
            target["scrapeUrl"]
            for target in targets["activeTargets"]
            if target["health"] == "down" and _is_ours(target)
        ],
        len(ours),
        [str(rule["name"]) for rule in ours if rule.get("health") == "err"],
    )


def _is_ours(target: Any) -> bool:
    return "leyline" in str(target["labels"].get("job", "")).lower()


async def _data(client: httpx.AsyncClient, path: str, **query: str) -> Any:
    return (await document(client, path, **query))["data"]


def _shown(url: str) -> str:
    try:
        return str(httpx.URL(url).copy_with(userinfo=b""))
    except httpx.InvalidURL:
        return "the URL"
