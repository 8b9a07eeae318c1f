"""``leyline doctor``: finds problems of a proxy with these settings, and fixes for them.

Each check gathers facts and gives a verdict on them. The verdicts are pure.
"""

from __future__ import annotations

from .checks import Situation, checks_for
from .configured import config_findings
from .examination import Check, examine
from .findings import Finding, Status, document, healthy

__all__ = [
    "Check",
    "Finding",
    "Situation",
    "Status",
    "checks_for",
    "config_findings",
    "document",
    "examine",
    "healthy",
]
