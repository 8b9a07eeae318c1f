"""The end of SGLang requests that claims leave no room for, in SGLang's own ways.

A refused request ends like one that finds the queue full: HTTP 503, with a message that names the
claims in the way. One that has begun to stream ends with an error of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import AbortReq, DumperControlReqOutput
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from leyline_engine.contract import ClaimRefusal, Reason
from leyline_engine.scheduler.containment import contained
from leyline_engine.server.claim_clock import ClaimMessage
from leyline_engine.server.claim_desk import explain
from leyline_engine.sglang.engine import SchedulerEngine


def refuse_request(scheduler: Any, engine: SchedulerEngine, req: Any) -> bool:
    """End a request that is about to be queued, if it can't run before a claim ends.

    Returns:
        True if it was ended.
    """
    refusal = engine.refuse(req, began=bool(req.output_ids))
    if refusal is None:
        return False
    _abort(scheduler, req, refusal)
    return True


def refuse_waiting(scheduler: Any, engine: SchedulerEngine) -> None:
    """End all waiting requests that can't run before a claim ends."""
    engine.claims.recheck = False
    with contained("looking again at what waits"):
        for req in tuple(scheduler.waiting_queue):
            refusal = engine.refuse(req, began=bool(req.output_ids))
            if refusal is not None:
                scheduler.waiting_queue.remove(req)
                _abort(scheduler, req, refusal)


def refuse_chunked(scheduler: Any, engine: SchedulerEngine) -> None:
    """End a prompt that is computed in chunks, if later claims leave no slots for the next chunk.

    SGLang relies on what it admitted, and would end itself.
    """
    req = scheduler.chunked_req
    if req is None or not engine.claims.keeper.book.protected_pages:
        return
    with contained("asking whether claims leave room for a chunk"):
        rest = len(req.origin_input_ids) + len(req.output_ids) - req.extend_end
        chunk = engine.cache.in_pages(min(rest, scheduler.chunked_prefill_size or rest))
        if chunk <= engine.room() or (engine.give_way() and chunk <= engine.room()):
            return
        req.discard_output_reason = _ending(engine.refuse_running(req))
        scheduler._pending_chunked_abort_req = req


def _abort(scheduler: Any, req: Any, refusal: ClaimRefusal) -> None:
    scheduler._release_aborted_request(req)
    scheduler.send_abort_output(
        AbortReq(rid=req.rid, finished_reason=_ending(refusal).to_json()), req
    )


def _ending(refusal: ClaimRefusal) -> FINISH_ABORT:
    return FINISH_ABORT(
        explain(refusal), HTTPStatus.SERVICE_UNAVAILABLE, Reason.REFUSED_BY_CLAIM.value
    )


def name_outgrown(engine: SchedulerEngine, aborted: Iterable[Any]) -> None:
    """Report the cause of requests that ended because claims left decoding no memory."""
    for req in aborted:
        refusal = engine.refuse(req, began=True)
        if refusal is not None:
            req.to_finish = _ending(refusal)
        # SGLang gave their slots back, and doesn't report them again.
        engine.dropped(req.rid)


def answer_control(scheduler: Any, engine: SchedulerEngine, message: Any) -> None:
    """Carry out a message of the HTTP process, and answer it."""
    output = DumperControlReqOutput(success=False, response=[], error="failed")
    with contained("carrying out a command"):
        told = msgspec.convert(message.body, ClaimMessage)
        answer = engine.claims.carry_out(told)
        if told.question:
            found = engine.ledger_desk.answer(told.question)
            answer = msgspec.structs.replace(answer, ledger=found)
        body = {"answer": msgspec.json.encode(answer).decode()}
        output = DumperControlReqOutput(success=True, response=[body])
    scheduler.ipc_channels.send_to_tokenizer.send_output(output, message)
