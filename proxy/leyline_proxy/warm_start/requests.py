"""The request that replays one run. Pure."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import msgspec

from leyline_engine.contract import (
    EditPayload,
    Envelope,
    ReuseMode,
    ReusePayload,
    edit_envelope,
    sign_envelope,
)

from ..plan.planning import sink_of
from ..settings.cache_scope import MEMBER
from ..tenants import Tenant
from ..upstream.handshake import UpstreamStatus
from .runs import Run


def replay_body(
    run: Run, tenant: Tenant, status: UpstreamStatus, secret: str | None
) -> dict[str, Any]:
    """Return the completion request that computes a run's KV, under the name of its session.

    Args:
        secret: shared with the engine.
    """
    body: dict[str, Any] = {
        "model": run.identity.model,
        "prompt": run.tokens.tolist(),
        "max_tokens": 1,
        "temperature": 0,
        "custom_params": {"kv_hints": msgspec.to_builtins(_envelope(run, tenant, status, secret))},
    }
    if tenant.cache_salt is not None:
        body[MEMBER] = tenant.cache_salt
    return body


def _envelope(run: Run, tenant: Tenant, status: UpstreamStatus, secret: str | None) -> Envelope:
    payload = EditPayload(
        session=run.session,
        scope=run.tenant,
        turn=f"warm-{uuid4().hex[:12]}",
        spans=run.spans,
        sink=sink_of(status),
    )
    reuses = status.capability is not None and status.capability.reuses
    # The engine indexes only content whose tenant asks for reuse.
    asks = tenant.reuse != "off" and reuses and status.splices
    reuse = ReusePayload(mode=ReuseMode.OBSERVE) if asks else None
    if reuse is None and tenant.recall and status.reuses_within:
        reuse = ReusePayload(mode=ReuseMode.LIVE, within=(), own=True)
    envelope = edit_envelope(f"m-{uuid4().hex}", payload, reuse=reuse)
    return envelope if secret is None else sign_envelope(envelope, secret)
