"""The receipt of an admitted turn, as each engine with a scheduler of its own writes it. Pure."""

from __future__ import annotations

from typing import Protocol

import msgspec

from leyline_engine.admit.content_reuse import reuse_counts
from leyline_engine.admit.edits import EditRefusedError
from leyline_engine.admit.plan import Plan
from leyline_engine.admit.rules import CheckedRequest, EditVerdict, judge
from leyline_engine.contract import (
    EditPayload,
    ForgetCounts,
    LineageRun,
    Outcome,
    Receipt,
    RecurrentEdits,
    SkippedAction,
    TokenCounts,
)


class AccountedTurn(Protocol):
    """The state of a turn, as far as its receipt shows it."""

    message_id: str
    payload: EditPayload | None
    refusal: EditRefusedError | None
    """Reason for which its envelope was refused before it was checked."""
    skipped: tuple[SkippedAction, ...]
    forgot: ForgetCounts | None
    lineage: tuple[LineageRun, ...]
    withheld: bool
    """True if a forget made KV that it computes unfit to keep."""
    private: bool
    """True if its KV is kept out of the cache."""
    gated: bool
    """True if it runs without reuse because the margin of an earlier turn was too small."""
    spent_ns: int


def receipt_of(
    turn: AccountedTurn, checked: CheckedRequest, plan: Plan, counts: TokenCounts
) -> Receipt:
    """Return the receipt of a turn whose request runs from now on.

    Args:
        plan: as it is carried out.
    """
    payload = turn.payload
    verdict = judge(checked, plan, turn.forgot)
    if payload is None and turn.refusal is not None:
        verdict = EditVerdict(Outcome.REPREFILLED, turn.refusal.reason, turn.refusal.detail)
    freed = turn.forgot.overwritten if turn.forgot is not None else 0
    reuse = reuse_counts(checked, plan)
    if reuse is not None:
        reuse = msgspec.structs.replace(reuse, gated=turn.gated)
    return Receipt(
        message_id=turn.message_id,
        session=payload.session if payload is not None else "",
        turn=payload.turn if payload is not None and not (turn.withheld or turn.private) else "",
        outcome=verdict.outcome,
        reason=verdict.reason,
        detail=verdict.detail,
        tokens=msgspec.structs.replace(counts, freed=freed),
        directives=verdict.directives,
        forgot=turn.forgot,
        reuse=reuse,
        lineage=turn.lineage,
        extents=plan.spliced_extents,
        skipped_actions=turn.skipped,
        state=RecurrentEdits.KEPT if checked.recurrent and plan.spliced else "",
        stages=plan.stages,
        splice_us=turn.spent_ns // 1000,
    )
