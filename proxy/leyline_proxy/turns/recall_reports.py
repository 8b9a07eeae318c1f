"""Reports on recalled texts: their places in a prompt, and the verdicts on them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from leyline_engine.contract import CopySegment, Receipt

from ..edits.asides import CHANGE, last_answer, references_in
from ..edits.working_set import settled
from ..model.asides import NotRecalled, RecallCall
from ..model.working_set import Extent, PieceCause, PieceReport, PieceVerdict, WorkingSet
from ..plan.planning import Planned
from ..plan.recalled import places_of
from .turn import Turn

RecallWay = Literal["tool", "reference", "context"]
"""The way that a text was asked for."""

_REFUSED = frozenset({PieceCause.FORGOTTEN})


@dataclass(frozen=True, slots=True)
class RecallOutcome:
    """The outcome for one text that was asked for."""

    way: RecallWay
    report: PieceReport
    policy: str = ""
    """The policy that had evicted it; empty if unknown."""


def report_of(call: RecallCall, selector: str) -> PieceReport:
    """Return the report on a recall, before the text's place in a prompt is known.

    Args:
        selector: names the recall, as in ``calls[0]``.
    """
    report = _report(selector, call.address, call.cause)
    return msgspec.structs.replace(report, tokens=call.tokens, price_tokens=call.tokens)


def recall_outcomes(turn: Turn, receipt: Receipt) -> tuple[RecallOutcome, ...]:
    """Return what became of the texts that came into a turn's prompt, or that were asked for."""
    if not turn.request.tenant.recall and turn.planned.prepared.working_set is None:
        return ()
    planned, session = turn.planned, turn.identity.session
    asides = (*(session.asides if session is not None else ()), *turn.appended)
    calls = {call.id: call for aside in asides for call in aside.calls}
    found = [*_answered(planned, calls), *_referred(turn)]
    if planned.prepared.working_set is not None:
        policies = {call.address: call.policy for call in calls.values()}
        found += [
            RecallOutcome("context", each, policies.get(each.address or "", ""))
            for each in planned.prepared.working_set.reports
        ]
    if not found:
        return ()
    places = places_of(planned)
    appended = {
        call.address: places[at]
        for at, entry in enumerate(planned.prepared.sent)
        if at in places
        and entry.client_index is None
        and CHANGE in entry.changes
        and (call := calls.get(str(entry.message.get("tool_call_id") or ""))) is not None
    }
    messages = {
        entry.client_index: places[at]
        for at, entry in enumerate(planned.prepared.sent)
        if entry.client_index is not None and at in places
    }
    asked = WorkingSet(reports=tuple(each.report for each in found))
    final = settled(asked, messages, appended, served_extents(planned, receipt))
    return tuple(
        RecallOutcome(each.way, report, each.policy)
        for each, report in zip(found, final, strict=True)
    )


def _answered(planned: Planned, calls: dict[str, RecallCall]) -> Iterator[RecallOutcome]:
    """Yield the model's calls whose results this prompt is the first to have."""
    sent = planned.prepared.sent
    number = 0
    for entry in sent[last_answer(sent) + 1 :]:
        call = calls.get(str(entry.message.get("tool_call_id") or ""))
        if call is not None and entry.client_index is None and not call.own:
            yield RecallOutcome("tool", report_of(call, f"calls[{number}]"), call.policy)
            number += 1


def _referred(turn: Turn) -> Iterator[RecallOutcome]:
    """Yield the references in messages that came with this turn."""
    told, sent = turn.told, turn.planned.prepared.sent
    if told is None:
        return
    new = {entry.client_index for entry in sent[last_answer(sent) + 1 :]}
    messages = turn.request.messages
    if not any(references_in(messages[at] for at in new if at is not None)):
        return
    references = [tuple(references_in([message])) for message in messages]
    for index, causes in enumerate(told.judged(references)):
        for number, cause in enumerate(causes if index in new else ()):
            written = references[index][number]
            selector = f"messages[{index}].references[{number}]"
            report = _report(selector, told.whole.get(written, written), cause)
            yield RecallOutcome("reference", msgspec.structs.replace(report, messages=(index,)))


def served_extents(planned: Planned, receipt: Receipt) -> list[Extent]:
    """Return the extents of a prompt that its engine served without computing them."""
    tokens = receipt.tokens
    extents = [(0, tokens.prefix)]
    if tokens.spliced:
        copies = (each for each in planned.plan.segments if isinstance(each, CopySegment))
        extents += [(each.dest, each.dest_end) for each in copies]
    if receipt.reuse is not None:
        extents += receipt.reuse.extents
    return extents


def documents(outcomes: Iterable[RecallOutcome], way: RecallWay) -> list[dict[str, object]]:
    """Return the reports of one way, for the account."""
    return [each.report.document() for each in outcomes if each.way == way]


def _report(selector: str, address: str, why: NotRecalled | None) -> PieceReport:
    cause = PieceCause(why) if why is not None else None
    verdict = PieceVerdict.FAULT
    if cause is not None:
        verdict = PieceVerdict.REFUSE if cause in _REFUSED else PieceVerdict.ABSTAIN
    return PieceReport(selector=selector, verdict=verdict, cause=cause, address=address or None)
