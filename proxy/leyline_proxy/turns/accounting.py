"""Results of a turn: the receipt, the caller's account, and the part that the session keeps."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from leyline_engine.contract import Outcome, Reason, Receipt, TokenCounts, TurnRecord, token_digest

from ..model.derived import Derived
from ..model.paid import Paid, paid_account
from ..model.rendered import Rendered
from ..model.session import RetainedTurn
from ..model.vocabulary import ForgetResult
from ..model.working_set import WorkingSet
from ..plan.outgoing import reuse_mode
from ..request.resemblance import offers_tools
from ..sessions.summary import edit_account, receipt_account
from .recall_reports import RecallOutcome, documents
from .turn import Turn

_TOKEN_BYTES = 16
"""Bytes for a token's id and spans."""

_TEXT_BYTES = 3
"""Bytes of decoded messages, both as the client sent them and as sent on, per byte of the body."""

NO_RECEIPT = "the engine gave no receipt for this request"
EXACT_STATES = "the model has recurrent layers, and recurrent_edits is exact"
UNNAMED = "the caller's own edits are spliced in sessions with a name only; send x-leyline-session"


def tokens_of_usage(usage: Mapping[str, Any] | None) -> TokenCounts:
    """Return the token counts of an OpenAI ``usage`` object; zeros for those it lacks."""
    if not isinstance(usage, Mapping):
        return TokenCounts()
    prompt = _count(usage.get("prompt_tokens"))
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else 0
    cached = min(cached, prompt)
    return TokenCounts(prompt=prompt, prefix=cached, prefilled=prompt - cached)


def cached_of_usage(usage: Mapping[str, Any] | None) -> int | None:
    """Return ``cached_tokens`` of an OpenAI ``usage`` object; None if absent."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return cached if isinstance(cached, int) and cached >= 0 else None


def final_receipt(
    turn: Turn, record: TurnRecord | None, usage: Mapping[str, Any] | None
) -> Receipt:
    """Return the receipt of a turn from all known facts.

    The engine sees only directives; only the proxy knows that a turn was edited and sent as an
    ordinary prefill. So the plan fills in where the engine has nothing to report.
    """
    plan = turn.planned.plan
    if record is not None:
        receipt = record.receipt
        if receipt.reason is None and plan.planned is Outcome.EDITED:
            return msgspec.structs.replace(receipt, outcome=Outcome.EDITED, reason=plan.reason)
        if receipt.reason is None and plan.planned is not Outcome.UNEDITED:
            reason = plan.reason or Reason.REPREFILLED
            return msgspec.structs.replace(
                receipt, outcome=Outcome.REPREFILLED, reason=reason, detail=_detail(turn, reason)
            )
        return receipt
    receipt = Receipt(
        message_id=turn.message_id,
        session=turn.identity.session_id,
        turn=turn.name,
        outcome=plan.planned,
        reason=plan.reason,
        tokens=tokens_of_usage(usage),
    )
    if turn.enveloped:
        receipt = msgspec.structs.replace(receipt, detail=NO_RECEIPT)
    if plan.planned is Outcome.SPLICED:
        # The splice is unconfirmed, so it isn't claimed.
        return msgspec.structs.replace(
            receipt, outcome=Outcome.REPREFILLED, reason=Reason.TRANSFORM_FAILED
        )
    if plan.planned is Outcome.REPREFILLED and plan.reason is not None and not receipt.detail:
        return msgspec.structs.replace(receipt, detail=_detail(turn, plan.reason))
    return receipt


def caller_account(
    turn: Turn,
    receipt: Receipt,
    paid: Paid | None = None,
    *,
    refused_pins: Sequence[Mapping[str, Any]] = (),
    forgets_owed: int = 0,
    recalled: Sequence[RecallOutcome] = (),
) -> dict[str, Any]:
    """Return the member ``leyline`` of the response: receipt, edits and policy faults, no text.

    Args:
        paid: the reasons for the turn's prefilled tokens; None if unknown.
        refused_pins: pins of messages that an engine with claims refused.
        forgets_owed: number of engine runs that still have to forget something of the session.
        recalled: what became of recalled texts.
    """
    account = receipt_account(receipt)
    if (wanted := turn.request.options.busts) != "off":
        account["busts"] = paid_account(paid, entries=wanted != "sums")
    result = forget_result(turn, receipt, forgets_owed)
    if result is not None:
        account["forgot"] = {"result": result, **(account["forgot"] or {})}
        account |= (turn.planned.derived or Derived()).account()
    if forgets_owed:
        account["forgets_owed"] = forgets_owed
    if turn.status.recurrent and (recalled or reuse_mode(turn.request) != "off"):
        account["reuse_refused"] = Reason.RECURRENT_STATE.value
    if turn.planned.plan.omitted:
        account["edits_omitted"] = turn.planned.plan.omitted
    if turn.request.moved_tools:
        account["tools_moved"] = turn.request.moved_tools
    if turn.planned.prepared.working_set is not None:
        account["context"] = _working_set(turn.planned.prepared.working_set, recalled)
    if turn.identity.shown_name:
        account["session_name"] = turn.identity.shown_name
    return account | {
        "session": turn.identity.session_id,
        "turn": turn.name,
        "turn_index": turn.index,
        "planned": turn.planned.plan.planned.value,
        "edits": [edit_account(edit) for edit in turn.planned.plan.edits],
        "standing": [
            {"cause": each.cause, "mode": each.mode, "messages": each.messages}
            for each in turn.planned.plan.standing
        ],
        "policy_faults": [
            {"policy": fault.policy, "fault": fault.fault} for fault in turn.planned.prepared.faults
        ],
        "refused_verbs": [*_refused_verbs(turn), *refused_pins],
        "policy_notes": [
            {"policy": note.policy, "kind": note.kind, **note.values}
            for note in turn.planned.prepared.notes
        ],
    }


def _working_set(found: WorkingSet, recalled: Sequence[RecallOutcome]) -> dict[str, Any]:
    """Return the account of a request's working set."""
    return {
        "pieces": documents(recalled, "context"),
        "refused": [report.document() for report in found.refusals],
        "spent_tokens": found.spent_tokens,
        "budget_tokens": found.budget_tokens,
    }


def forget_result(turn: Turn, receipt: Receipt, forgets_owed: int) -> ForgetResult | None:
    """Return the result of the turn's demands to forget; None if it demanded nothing.

    Args:
        forgets_owed: number of engine runs that still have to forget something of the session.
    """
    plan, counts = turn.planned.plan, receipt.forgot
    if plan.unreachable or (plan.forgets and not turn.enveloped):
        return "unreachable"
    if counts is None and not plan.forgets:
        return None
    if counts is None or forgets_owed:
        return "owed"
    return "pending" if counts.pending else "erased"


def _refused_verbs(turn: Turn) -> list[dict[str, Any]]:
    """Return the annotations that this engine can't follow."""
    if turn.status.takes_claims:
        return []
    return [
        {"message": index, "verb": "pin", "reason": "the engine takes no claims"}
        for index, annotation in turn.request.annotations.items()
        if annotation.pinned is not None
    ]


def account_headers(receipt: Receipt) -> dict[str, str]:
    """Return the response headers of an answer that isn't streamed."""
    tokens = receipt.tokens
    return {
        "x-leyline-outcome": receipt.outcome.value,
        "x-leyline-cached-tokens": str(tokens.served),
        "x-leyline-spliced-tokens": str(tokens.spliced),
        "x-leyline-reused-tokens": str(tokens.reused),
    }


def retained_turn(
    turn: Turn, record: TurnRecord | None, receipt: Receipt, run: str
) -> RetainedTurn | None:
    """Return the turn for use by later ones, or None if the engine doesn't hold it.

    It is a source only for an engine that received its envelope. With any other engine it has no
    tokens, and serves to find the next turn's edits.

    Args:
        run: model and run of the engine that served it.
    """
    rendered, names = turn.planned.rendered, turn.planned.names
    if names is None:
        return None
    outputs: tuple[int, ...] = ()
    if not turn.enveloped:
        rendered = Rendered(array("q"), (), turn.planned.plan.reach.context)
    elif record is None or not record.finished or rendered is None:
        return None
    else:
        outputs = tuple(record.output_ids)
    return RetainedTurn(
        turn=turn.name,
        index=turn.index,
        prepared=turn.planned.prepared,
        rendered=rendered,
        output_ids=outputs,
        lineage=tuple(receipt.lineage),
        receipt=receipt,
        digest=token_digest(rendered.tokens + array("q", outputs)),
        model_fingerprint=run,
        names=names,
        replica=turn.replica.name,
        model=turn.request.computed_by,
        offers_tools=offers_tools(turn.request),
        retells=turn.identity.retells,
        weight=_TOKEN_BYTES * (len(rendered.tokens) + len(outputs))
        + _TEXT_BYTES * len(turn.request.raw),
    )


def _detail(turn: Turn, reason: Reason) -> str:
    if reason is Reason.UNNAMED_SESSION:
        return UNNAMED
    if reason is Reason.RECURRENT_STATE:
        return EXACT_STATES
    if reason is Reason.UNSUPPORTED_RUNTIME:
        return turn.status.obstacle or "the engine can't splice this request"
    if turn.status.obstacle:
        return turn.status.obstacle
    return "the edit was sent as an ordinary prefill"


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return max(0, value)
