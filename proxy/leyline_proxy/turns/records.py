"""The engine's record of a turn, and the run that wrote it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from leyline_engine.contract import Reason, Receipt, TurnRecord

from .turn import Turn

_WAITS_S = (0.0, 0.005, 0.02, 0.05, 0.1, 0.2)
"""Pauses before each request for a record that the engine may still be writing."""

_REFUSAL_WAITS_S = (0.0, 0.02)
"""The same after an error answer of the engine."""

_OTHER_ENGINE = frozenset(
    {Reason.MISSING_SOURCE, Reason.TOKEN_MISMATCH, Reason.UNSUPPORTED_RUNTIME}
)
"""Reasons given by another engine than the one last asked, or by one with other flags."""


def record_in(turn: Turn, member: bytes) -> TurnRecord | None:
    """Return the turn's record in a member of its answer; None for another's or a partial one."""
    try:
        record = msgspec.json.decode(member, type=TurnRecord)
    except msgspec.DecodeError:
        return None
    own = record.receipt.message_id == turn.message_id
    return record if own and record.finished else None


async def record_of(turn: Turn, came: TurnRecord | None, deadline: float) -> TurnRecord | None:
    """Return the engine's record, complete if that comes in time; None if there is none.

    Args:
        came: the record that came with the answer.
        deadline: for all requests of the turn; see :meth:`RecordRoute.deadline`.
    """
    if not turn.enveloped:
        return None
    if came is not None:
        turn.replica.records.came()
        return came
    return await turn.replica.records.ask(turn.message_id, _WAITS_S, deadline, due=True)


async def record_of_refusal(turn: Turn) -> TurnRecord | None:
    """Return the record of a turn that the engine answered with an error, if it wrote one."""
    records = turn.replica.records
    deadline = records.deadline()
    return await records.ask(turn.message_id, _REFUSAL_WAITS_S, deadline, due=False)


async def run_of(turn: Turn, record: TurnRecord | None, receipt: Receipt, deadline: float) -> str:
    """Return the engine run that served a turn, as far as is known; see ``retains_as``.

    Args:
        deadline: as for the record.
    """
    believed = turn.status.retains_as
    if turn.stranger:
        return f"{believed.rpartition('@')[0]}@{turn.stranger}"
    if not turn.enveloped or (record is not None and receipt.reason not in _OTHER_ENGINE):
        return believed
    handshake = turn.replica.handshake
    if record is None or receipt.reason is not Reason.MISSING_SOURCE:
        # Records that always fail show nothing about the engine's run.
        if record is not None or not turn.replica.records.given_up:
            handshake.report_failure()
        return believed
    # Most likely it was another run than believed; its status is useful for the next turn.
    if handshake.status.retains_as == believed:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await handshake.refresh()
    return handshake.status.retains_as
