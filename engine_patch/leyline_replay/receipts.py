"""The receipt of a request as it was admitted."""

from __future__ import annotations

import time

from leyline_engine.contract import Receipt, RecurrentEdits, TokenCounts
from leyline_replay.admission import Admission
from leyline_replay.requests import GenerationRequest


def receipt_of(
    request: GenerationRequest, admission: Admission, started: int, *, admits: bool
) -> Receipt:
    """Return the receipt of a request that runs from now on.

    Args:
        started: start of its admission, by the performance counter, in nanoseconds.
        admits: True if its turn may be a source.
    """
    payload, plan, verdict = request.payload, admission.plan, admission.verdict
    return Receipt(
        message_id=request.request_id,
        session=payload.session if payload else "",
        turn=payload.turn if payload and admits else "",
        outcome=verdict.outcome,
        reason=verdict.reason,
        detail=verdict.detail,
        tokens=TokenCounts(
            prompt=plan.length,
            prefix=plan.prefix,
            spliced=plan.spliced,
            reused=plan.reused,
            prefilled=plan.prefilled,
            freed=admission.forgot.overwritten if admission.forgot else 0,
        ),
        directives=verdict.directives,
        forgot=admission.forgot,
        reuse=admission.reuse,
        lineage=admission.lineage,
        extents=plan.spliced_extents,
        skipped_actions=request.skipped,
        state=RecurrentEdits.KEPT.value if admission.states else "",
        splice_us=(time.perf_counter_ns() - started) // 1000,
    )
