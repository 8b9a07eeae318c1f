"""Results of checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

_MOST = 600
"""Largest number of characters of a detail, part of which a server may have written."""


class Status(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    """Works now, but is likely to cause trouble later."""
    FAIL = "fail"
    SKIP = "skip"
    """Nothing to check, or no way to check it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. Holds no secret."""

    name: str
    """Name of the check: ``redis.eviction``."""
    status: Status
    detail: str
    fix: str = ""
    """The remedy; empty if there is none."""


def ok(name: str, detail: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(name, Status.OK, _short(detail))


def warn(name: str, detail: str, fix: str) -> Finding:
    """Return a finding with a warning."""
    return Finding(name, Status.WARN, _short(detail), _short(fix))


def fail(name: str, detail: str, fix: str) -> Finding:
    """Return a finding of a failure."""
    return Finding(name, Status.FAIL, _short(detail), _short(fix))


def skip(name: str, detail: str) -> Finding:
    """Return a finding that there was nothing to check."""
    return Finding(name, Status.SKIP, _short(detail))


def _short(text: str) -> str:
    # Names of files may hold bytes that aren't text, which JSON can't hold.
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


def healthy(findings: Sequence[Finding]) -> bool:
    """Return True if nothing failed."""
    return not any(finding.status is Status.FAIL for finding in findings)


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the report as ``--json`` prints it."""
    return {"ok": healthy(findings), "checks": [asdict(finding) for finding in findings]}
