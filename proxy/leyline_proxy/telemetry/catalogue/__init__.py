"""Every metric of the proxy, as data for the code, the documentation and the tests."""

from __future__ import annotations

from . import cache, claims, edits, recalls, requests, state, upstreams
from .entries import CatalogueEntry, Group, Merge
from .processes import PROCESS_METRICS

GROUPS: tuple[Group, ...] = (
    *requests.GROUPS,
    *cache.GROUPS,
    *edits.GROUPS,
    *recalls.GROUPS,
    *upstreams.GROUPS,
    *state.GROUPS,
    *claims.GROUPS,
)

ENTRIES: tuple[CatalogueEntry, ...] = tuple(entry for group in GROUPS for entry in group.entries)

__all__ = ["ENTRIES", "GROUPS", "PROCESS_METRICS", "CatalogueEntry", "Group", "Merge"]
