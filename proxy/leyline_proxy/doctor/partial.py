"""The report on settings of which some have errors: the rest is examined all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..settings.readable import ReadablePart
from .findings import Finding, Status, skip
from .running import Check

_ENGINES = ("upstream", "upstreams", "router", "engine", "engine_options", "model")
_READ_BY = {
    "redis": ("session_store",),
    "session-secret": ("session_store", "session_secret"),
    "api-keys": ("api_keys", "api_keys_file", "tenants"),
    "allowed-hosts": ("api_keys", "api_keys_file", "allowed_hosts", "host"),
    "policies": ("policy", "policies_file", "tenants"),
    "ports": ("host", "port", "admin_host", "admin_port"),
    "audit": ("audit_file",),
    "audit.redis": ("audit_redis",),
    "recall-store": ("recall_store", "recall_key"),
    "warm-start": ("warm_start_path", "warm_start_key"),
    "trace": ("trace",),
}
"""Settings without which a check would examine something else, by the beginning of its name."""


def without_missing(checks: Mapping[str, Check], part: ReadablePart) -> dict[str, Check]:
    """Return the checks that the part's settings suffice for."""
    gone = part.missing | part.invented
    return {name: check for name, check in checks.items() if gone.isdisjoint(_needs(name))}


def findings_of_part(
    broken: Sequence[Finding], part: ReadablePart, findings: Sequence[Finding]
) -> list[Finding]:
    """Return the whole report: first the errors, then what was found without those settings."""
    if not broken:
        return [*findings]
    found = [each for each in findings if (each.name, each.status) != ("config", Status.OK)]
    notes = []
    if part.missing:
        names = ", ".join(sorted(part.missing))
        notes.append(skip("config", f"the rest is examined without {names}"))
    return [*broken, *notes, *found]


def _needs(check: str) -> tuple[str, ...]:
    own = _READ_BY.get(check, ())
    return own or (_ENGINES if check.startswith("upstream.") else ())
