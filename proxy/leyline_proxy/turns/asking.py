"""The smallest request that carries a forget to an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec

from leyline_engine.contract import (
    EditPayload,
    ProvePayload,
    TurnRecord,
    edit_envelope,
    sign_envelope,
)

from ..model.spans import ANYTHING
from ..upstream.replica import Replica

_ANSWER_TIMEOUT_S = 30.0
"""Timeout of a request for one token, including its time in the engine's queue."""

_RECORD_WAITS_S = (0.0, 0.05, 0.25)


async def ask_forget(
    replica: Replica,
    owner: tuple[str, str],
    *,
    hints_secret: str | None,
    spans: Sequence[str] = (ANYTHING,),
    prove: ProvePayload | None = None,
) -> TurnRecord | None:
    """Ask an engine to forget, and return its record; None if it doesn't confirm the forget.

    Args:
        owner: tenant and session.
        spans: names in the engine's ledger.
        prove: the demand for a proof, if any.

    Raises:
        ProxyError: the engine can't be reached, or refuses the request.
    """
    capability = replica.status.capability
    if capability is None:
        return None
    tenant, session = owner
    message_id = f"m-{uuid4().hex}"
    payload = EditPayload(
        session=session, scope=tenant, turn=f"e-{uuid4().hex[:12]}", forget=tuple(spans)
    )
    envelope = edit_envelope(message_id, payload, prove=prove)
    if hints_secret is not None:
        envelope = sign_envelope(envelope, hints_secret)
    body: dict[str, Any] = {
        "model": capability.model,
        "messages": [{"role": "user", "content": "."}],
        "max_tokens": 1,
        "temperature": 0,
        "custom_params": {"kv_hints": msgspec.to_builtins(envelope)},
    }
    await replica.client.complete(body, _ANSWER_TIMEOUT_S)
    for pause in _RECORD_WAITS_S:
        await asyncio.sleep(pause)
        record = await replica.client.record(message_id)
        if record is not None and record.receipt.forgot is not None:
            return record
    return None
