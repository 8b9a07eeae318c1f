"""Documents for viewers besides turns: engines, claims and sessions, without prompt text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from leyline_engine.contract import ClaimStatus

from ..claims.documents import claim_document
from ..sessions.summary import SessionOverview, session_overview
from ..upstream.handshake import UpstreamStatus
from ..upstream.replica import Replica
from ..upstream.summary import replica_document
from .trend import STEP_S, Step

MAX_SESSIONS = 200
"""Largest number of sessions shown; the latest ones."""


def engine_document(replica: Replica) -> dict[str, Any]:
    """Return one engine, with its capability as readable names and values."""
    facts = [{"name": name, "value": value} for name, value in engine_facts(replica.status)]
    return replica_document(replica) | {"facts": facts}


def engine_facts(status: UpstreamStatus) -> list[tuple[str, str]]:
    """Return the engine's capability as readable names and values."""
    facts = [("Models", ", ".join(status.models) if status.models else "unknown")]
    capability = status.capability
    if capability is None:
        return facts
    facts += [
        ("Engine", capability.engine_label),
        ("Plugin", capability.plugin.version or "unknown"),
        ("Architecture", capability.architecture),
        ("Context", f"{capability.max_context:,} tokens"),
        ("Actions", ", ".join(capability.actions) or "none"),
    ]
    if capability.rotary is not None:
        rotary = capability.rotary
        facts.append(("Rotary", f"{rotary.rope_type}, {rotary.pairing}, {rotary.rotary_dim} wide"))
    if capability.kv is not None:
        kv = capability.kv
        size = f"{kv.capacity_tokens:,} tokens, {kv.layers} layers"
        facts.append(("KV cache", f"{kv.pool_class}, {kv.dtype}, {size}"))
    return facts


def claims_of(tenant: str, upstream: str, live: Iterable[ClaimStatus]) -> list[dict[str, Any]]:
    """Return the tenant's live claims on one engine, oldest first, as last seen."""
    found = []
    for status in live:
        if status.claim.tenant == tenant:
            claim = claim_document(status) | {"upstream": upstream}
            # Ages would change with every look.
            del claim["age_s"], claim["predicate"]
            found.append(claim)
    return found


def sessions_document(found: Sequence[SessionOverview]) -> dict[str, Any]:
    """Return the latest sessions, latest first, and the number of all."""
    answered = [item for item in found if item.answered]
    shown = [session_overview(item) for item in answered[:MAX_SESSIONS]]
    return {"sessions": shown, "total": len(answered)}


def trend_document(steps: Iterable[Step]) -> dict[str, Any]:
    """Return the last hour's steps."""
    return {"step_s": STEP_S, "steps": [asdict(step) for step in steps]}
