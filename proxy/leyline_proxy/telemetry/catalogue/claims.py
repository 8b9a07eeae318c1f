"""Claims on KV, one by one and in total."""

from __future__ import annotations

from .entries import CatalogueEntry, Group, counter, gauge

_OF_CLAIM = ("tenant", "claim")
_BY_KIND = ("tenant", "kind")

_SINGLY: tuple[CatalogueEntry, ...] = (
    gauge(
        "claim_state",
        "1 for the state that a live claim is in.",
        ("tenant", "claim", "kind", "state"),
        merge="livemostrecent",
    ),
    gauge(
        "claim_resident_tokens",
        "Tokens of a live claim that are in the KV cache.",
        _OF_CLAIM,
        merge="livemostrecent",
        bad="Below the required tokens: a soft claim was evicted, or its KV isn't computed yet.",
    ),
    gauge(
        "claim_hits",
        "Requests so far that matched all that a live claim holds.",
        _OF_CLAIM,
        merge="livemostrecent",
        bad="0 for a long time: the claim holds memory that nobody uses.",
    ),
    gauge(
        "claim_age_seconds",
        "Time since a live claim was accepted.",
        _OF_CLAIM,
        merge="livemostrecent",
    ),
    gauge(
        "claim_pressure",
        "Requests so far that were refused because of a live claim, and evictions that skipped it.",
        _OF_CLAIM,
        merge="livemostrecent",
        bad="Grows: the claim crowds out others.",
    ),
)

_TOTAL: tuple[CatalogueEntry, ...] = (
    gauge("claims", "Live claims.", _BY_KIND, merge="livemostrecent"),
    gauge(
        "claims_required_tokens",
        "Tokens that live claims require to be resident.",
        _BY_KIND,
        merge="livemostrecent",
        bad="'hard' near the pool's capacity: ordinary requests are refused.",
    ),
    gauge(
        "claims_resident_tokens",
        "Tokens of live claims that are in the KV cache. Shared tokens count for each claim.",
        _BY_KIND,
        merge="livemostrecent",
    ),
    counter("claim_events", "Events of the engine's claims, by kind.", ("event",)),
    counter(
        "claim_events_missed",
        "Events that the engine dropped before the proxy fetched them.",
        bad="Above 0: the proxy fetches too rarely; outcomes of claims may be incomplete.",
    ),
    counter(
        "claim_refusals",
        "Requests that were refused because they didn't fit beside hard claims.",
        ("tenant",),
        bad="Above 0: hard claims take too much of the pool.",
        starts=((),),
    ),
)

GROUPS = (
    Group(
        "Claims, singly",
        "The 256 oldest live claims; the series end with the claims. The label claim is the id.",
        _SINGLY,
    ),
    Group("Claims, in total", "All live claims, and their events.", _TOTAL),
)
