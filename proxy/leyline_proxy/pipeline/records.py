"""What the engine wrote down of a turn, and which run of it wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from leyline_engine.contract import Reason, Receipt, TurnRecord

from ..errors import ProxyError
from .turn import Turn

_WAITS_S = (0.0, 0.005, 0.02, 0.05, 0.1, 0.2)
"""Pauses before each question for a record that the engine may still be writing."""

REFUSAL_WAITS_S = (0.0, 0.02)
"""The same for one whose engine has answered with an error."""

_OTHER_ENGINE = frozenset({Reason.MISSING_SOURCE, Reason.TOKEN_MISMATCH})
"""What an engine says that isn't the one that was asked last."""


async def record_of(turn: Turn, waits_s: Sequence[float] = _WAITS_S) -> TurnRecord | None:
    """The engine's record, complete if that comes in time; None if there is none."""
    record: TurnRecord | None = None
    for pause in waits_s:
        await asyncio.sleep(pause)
        try:
            record = await turn.replica.client.record(turn.message_id) or record
        except ProxyError:
            turn.replica.handshake.report_failure()
            return record
        if record is not None and (record.finished or record.receipt.refused is not None):
            break
    return record


async def run_of(turn: Turn, record: TurnRecord | None, receipt: Receipt) -> str:
    """Which run of the engine served a turn, as far as is known; see ``retains_as``."""
    believed = turn.status.retains_as
    if not turn.enveloped or (record is not None and receipt.reason not in _OTHER_ENGINE):
        return believed
    if record is None or receipt.reason is not Reason.MISSING_SOURCE:
        turn.replica.handshake.report_failure()
        return believed
    # Another run than was believed, most likely; what it holds is of use to the next turn.
    status = turn.replica.status
    if status.retains_as == believed:
        status = await turn.replica.handshake.refresh()
    return status.retains_as
