"""The ends of turns: settled, refused because of claims, abandoned or withdrawn."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_engine.contract import Outcome, Receipt, TurnRecord

from ..edits.costs import CostBooks
from ..errors import RefusedByClaimError
from ..model.asides import Aside
from ..model.fields import OPTIONS_FIELD
from ..model.messages import Message
from ..model.paid import Bust, Origin, Paid, Price, largest
from ..model.places import owed
from ..model.rendered import MessageSpan
from ..model.session import Session
from ..plan.busts import CacheAccount, Loss
from ..plan.reach import cause_label
from ..request.context_management import CONTEXT_FIELD
from ..sessions.store import SessionChange
from ..telemetry.metrics import Metrics, exemplar
from ..telemetry.tracing.usage import receipt_span
from ..upstream.pool import ReplicaPool
from .accounting import account_headers, caller_account, final_receipt
from .charging import TurnCharges
from .erasure import Erasures
from .ports import KeptText, PinRefusals, TurnObserver
from .recall_reports import RecallOutcome, recall_outcomes
from .records import record_of_refusal, run_of
from .retaining import session_after, session_owing, session_without
from .routing import Routing
from .settled import SettledTurn, cache_account, generated_tokens, source_of
from .turn import Turn
from .under_way import TurnsUnderWay
from .writing import Writing

_NOT_COPIED = "not_spliced"
"""An edit's ``why`` if the engine was asked for no splice."""

_LONGEST_NAME = 64
"""Characters of a tool's name; the caller's own, so of any length."""


def paid_for(
    turn: Turn,
    receipt: Receipt,
    cache: CacheAccount,
    *,
    prefill_us: float | None,
    price: Price | None,
    generated: int | None,
) -> Paid | None:
    """Return the reasons for a turn's prefilled tokens; None without the engine's counts.

    Args:
        prefill_us: microseconds per prefilled token; None if unknown.
        generated: tokens of the answer; None if unknown.
    """
    if receipt.tokens.prompt <= 0:
        return None
    reach = turn.planned.plan.reach
    lost = sum(loss.tokens for loss in cache.losses)
    return Paid(
        compared=reach.turn if reach.known else "",
        estimated=reach.estimated and reach.known,
        lost=lost,
        new=cache.fresh + sum(cache.busts.values()) - lost,
        cached=cache.cached + cache.spliced + cache.reused,
        generated=generated,
        busts=largest(_busts(turn, receipt, cache.losses)),
        prefill_us=prefill_us or None,
        price=price,
        thinking=(cache.after_thinking, cache.thinking),
    )


def _busts(turn: Turn, receipt: Receipt, losses: Sequence[Loss]) -> list[Bust]:
    rendered = turn.planned.rendered
    spans = rendered.spans if rendered is not None else ()
    ends, starts = [span.end for span in spans], [span.start for span in spans]
    found: dict[Origin, Bust] = {}
    for loss in losses:
        origin = _origin(turn, receipt, loss)
        at = loss.start if loss.placed else None
        held = None
        if at is not None:
            # What the template adds counts as part of the message after it.
            first = bisect_right(ends, at)
            last = bisect_left(starts, at + loss.tokens)
            held = _in_client(turn, spans[first : max(last, first + 1)])
        before = found.get(origin)
        if before is not None:
            at = before.at
            held = _joined(before.messages, held)
        tokens = loss.tokens + (before.tokens if before is not None else 0)
        found[origin] = Bust(origin, tokens, at, held)
    return list(found.values())


def _origin(turn: Turn, receipt: Receipt, loss: Loss) -> Origin:
    client, cut = turn.planned.prepared.client, loss.cut
    if cut is None and not loss.placed:
        # An estimate blames the first edit, which only the plan knows.
        edits = (each for each in turn.planned.plan.edits if cause_label(each.cause) == loss.cause)
        if (edit := next(edits, None)) is not None:
            tool = _tool_of(client, edit.message)
            return Origin(edit.cause, edit.message, edit.role, tool, edit.mode, _NOT_COPIED)
    if cut is None:
        return Origin(loss.cause)
    if cut.withheld:
        why = "unnamed_session"
    elif cut.mode != "amortize":
        why = cut.mode
    elif receipt.outcome is Outcome.SPLICED:
        # Tokens that the engine computed again: the boundary, quotes, the sink, partial pages.
        why = "computed_again"
    else:
        why = receipt.reason.value if receipt.reason is not None else _NOT_COPIED
    tool = _tool_of(client, cut.message)
    return Origin(cut.cause, cut.message, cut.role, tool, cut.mode, why)


def _in_client(turn: Turn, spans: Sequence[MessageSpan]) -> tuple[int, int] | None:
    """Return the first and last message of the client's list among some of those sent."""
    sent = turn.planned.prepared.sent
    places = [index for span in spans if (index := sent[span.message].client_index) is not None]
    return (min(places), max(places)) if places else None


def _joined(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])


def _tool_of(client: Sequence[Message], index: int | None) -> str:
    """Return the name of the tool that a message calls first or is the result of; empty if none."""
    if index is None or not 0 <= index < len(client):
        return ""
    message = client[index]
    wanted = message.get("tool_call_id")
    if wanted is None:
        return _name_of(next(iter(_calls(message)), None))
    for earlier in reversed(client[:index]):
        for call in _calls(earlier):
            if call.get("id") == wanted:
                return _name_of(call)
    return ""


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    return [each for each in calls if isinstance(each, Mapping)] if isinstance(calls, list) else ()


def _name_of(call: Mapping[str, Any] | None) -> str:
    function = call.get("function") if call is not None else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name[:_LONGEST_NAME] if isinstance(name, str) else ""


@dataclass(frozen=True, slots=True)
class Account:
    """The account of a turn for its caller."""

    receipt: Receipt
    members: dict[str, Any]
    """Members of the response: ``leyline``, and ``context_management`` if requested."""
    recalled: tuple[RecallOutcome, ...] = ()
    """What became of recalled texts."""


class TurnSettler:
    """Ends turns.

    Args:
        observers: called in this order.
        routing: knows which engine has answered.
        pinning: reports refused pins.
        retained_turns: number of a session's turns that stay as sources.
        history_key: keys what is remembered of answers.
        charges: charges turns to their tenants' budgets.
        memories: lose what a turn leaves there after a forget that overtakes it.
        price_of: returns a model's price, by the name in the request; None if it has none.
    """

    def __init__(
        self,
        *,
        under_way: TurnsUnderWay,
        pool: ReplicaPool,
        costs: CostBooks,
        erasures: Erasures,
        routing: Routing,
        writing: Writing,
        pinning: PinRefusals,
        metrics: Metrics,
        observers: Sequence[TurnObserver],
        retained_turns: int,
        charges: TurnCharges,
        price_of: Callable[[str], Price | None],
        history_key: bytes = b"",
        memories: KeptText | None = None,
    ) -> None:
        self._memories = memories
        self._under_way = under_way
        self._pool = pool
        self._placing = under_way.placing
        self._costs = costs
        self._erasures = erasures
        self._routing = routing
        self._writing = writing
        self._pinning = pinning
        self._metrics = metrics
        self._observers = observers
        self._retained_turns = retained_turns
        self._history_key = history_key
        self._charges = charges
        self._price_of = price_of

    async def aclose(self) -> None:
        """Cancel the work that runs alongside the requests."""
        await self._writing.aclose()
        await self._pinning.aclose()

    def preview(self, turn: Turn, usage: Mapping[str, Any] | None) -> Account:
        """Return the account of a turn that isn't settled yet."""
        receipt = final_receipt(turn, None, usage)
        outcomes = recall_outcomes(turn, receipt)
        paid = self._paid(turn, receipt, None, usage, cache_account(turn, receipt, usage))
        return self._account(turn, receipt, turn.identity.session, outcomes, paid)

    async def settle(
        self,
        turn: Turn,
        usage: Mapping[str, Any] | None,
        *,
        came: TurnRecord | None = None,
        aside: Aside | None = None,
        quotable: bool = False,
        written: str | None = None,
    ) -> Account:
        """Add a turn that the engine has answered in full to its session, and account for it.

        Args:
            came: the record that came with the answer.
            aside: the proxy's own answer to calls in it.
            quotable: True if it is a text without calls, which a later list may quote.
            written: its text, if it answers a policy's question.

        Raises:
            SessionGoneError: see :func:`~.retaining.session_after`.
        """
        deadline = turn.replica.records.deadline()
        with receipt_span(usage):
            record = await self._routing.record(turn, came, deadline)
            turn = await self._routing.answered(turn, record, deadline)
        receipt = final_receipt(turn, record, usage)
        run = await run_of(turn, record, receipt, deadline)
        clock, model = turn.request.clock, self._pool.label(turn.request.model)
        with clock.working():
            with self._metrics.stage("account"):
                avoided_s = self._costs.avoided_s(model, receipt)
                ttft_s = clock.engine_ttft_s if turn.request.stream else None
                capability = turn.status.capability
                self._costs.learn(model, turn.replica.name, receipt, ttft_s, capability)
                cache = cache_account(turn, receipt, usage)
                settled = SettledTurn(
                    turn=turn,
                    receipt=receipt,
                    record=record,
                    usage=usage,
                    run=run,
                    source=source_of(
                        turn, record, receipt, run, quotable=quotable, key=self._history_key
                    ),
                    cache=cache,
                    model=model,
                    avoided_s=avoided_s,
                    aside=aside,
                    recalled=recall_outcomes(turn, receipt),
                    paid=self._paid(turn, receipt, record, usage, cache),
                    written=written,
                )
                session = await self._retain(settled)
            if turn.planned.prepared.wanted:
                self._writing.start(turn, session, self)
            account = self._account(turn, receipt, session, settled.recalled, settled.paid)
            await self._ended(settled, session)
        self._metrics.overhead_seconds.observe(clock.own_s, exemplar(turn.message_id))
        return account

    async def refusal(self, turn: Turn) -> RefusedByClaimError | None:
        """Return the error of a turn that the engine didn't run, or not to its end, because of
        claims; None for other reasons. The turn isn't retained."""
        if not turn.enveloped or not turn.status.takes_claims:
            return None
        record = await record_of_refusal(turn)
        refused = record.receipt.refused if record is not None else None
        if record is None or refused is None:
            return None
        model = self._pool.label(turn.request.model)
        for observer in self._observers:
            observer.refused(turn, record.receipt, model)
        headers = account_headers(record.receipt)
        return RefusedByClaimError(refused.own, refused.others, refused.retry_after_ms, headers)

    async def abandon(self, turn: Turn, *, client_left: bool = False) -> None:
        """Record a turn that went to the engine and won't be settled: its client has gone, or its
        answer broke off. The KV that the engine read in it has no names here."""
        await self._charges.abandoned(turn, client_left=client_left)
        for observer in self._observers:
            observer.abandoned(turn, self._pool.label(turn.request.model))
        now = time.time()

        def change(session: Session | None) -> Session:
            return session_without(session, turn, self._placing, now=now)

        await self._unsettled(turn, change)

    async def release(self, turn: Turn) -> None:
        """Withdraw a turn that ended without KV in any engine; its forgets are still owed."""
        self._under_way.watch.ended(turn)
        self._under_way.leave(turn)
        await self._charges.released(turn)
        if turn.name not in self._under_way:
            return
        if not turn.planned.plan.forgets:
            await self._under_way.close(turn)
            return
        now = time.time()

        def change(session: Session | None) -> Session:
            return session_owing(session, turn, self._placing, now=now)

        await self._unsettled(turn, change)

    async def _ended(self, settled: SettledTurn, session: Session) -> None:
        """Carry a turn's debts, and inform the observers."""
        turn = settled.turn
        self._erasures.start(session, turn.name)
        for observer in self._observers:
            observer.settled(settled, session)
        if turn.planned.plan.forgets:
            await self._erasures.saved()

    async def _retain(self, settled: SettledTurn) -> Session:
        now, keep, turn = time.time(), self._retained_turns, settled.turn

        def change(session: Session | None) -> Session:
            return session_after(session, settled, self._placing, keep=keep, now=now)

        # By then the client may have gone on from the list that a policy's question is about.
        chain = turn.identity.chain if turn.asks is None else None
        session = await self._under_way.end(turn, change, chain)
        await self._charges.settled(settled)
        # Its client may send the next turn before this one's connection is finished.
        self._under_way.leave(turn)
        await self._overtaken(turn, session)
        return session

    async def _overtaken(self, turn: Turn, session: Session) -> None:
        """Drop what a turn left in memories after a forget that was demanded while it ran."""
        if (
            self._memories is not None
            and session.demands > turn.demands + turn.planned.plan.forgets
        ):
            owner = turn.request.tenant.name, turn.identity.session_id
            await self._memories.forget(*owner, turn.name, turn.demands)

    async def _unsettled(self, turn: Turn, change: SessionChange) -> None:
        """Leave a turn without an answer in its session, and carry the resulting debts."""
        # A known session keeps the history that it was answered for.
        chain = turn.identity.chain if turn.identity.session is None else None
        session = await self._under_way.end(turn, change, chain)
        await self._overtaken(turn, session)
        if turn.planned.plan.forgets:
            self._metrics.forgets.labels(turn.request.tenant.name, "owed").inc()
        self._erasures.start(session, turn.name)
        if turn.planned.plan.forgets:
            await self._erasures.saved()

    def _paid(
        self,
        turn: Turn,
        receipt: Receipt,
        record: TurnRecord | None,
        usage: Mapping[str, Any] | None,
        cache: CacheAccount,
    ) -> Paid | None:
        model = self._pool.label(turn.request.model)
        return paid_for(
            turn,
            receipt,
            cache,
            prefill_us=self._costs.prefill_us(model, turn.replica.name),
            price=self._price_of(turn.request.model),
            generated=generated_tokens(record, usage),
        )

    def _account(
        self,
        turn: Turn,
        receipt: Receipt,
        session: Session | None,
        recalled: tuple[RecallOutcome, ...],
        paid: Paid | None,
    ) -> Account:
        waiting = len(owed(session.places)) if session is not None else 0
        refused = self._pinning.refusals(turn)
        account = caller_account(
            turn, receipt, paid, refused_pins=refused, forgets_owed=waiting, recalled=recalled
        )
        if turn.request.compacted is not None:
            account["compaction"] = turn.request.compacted.document()
        members = {OPTIONS_FIELD: account}
        if turn.request.body.get(CONTEXT_FIELD) is not None:
            report = turn.request.compacted
            before = report.applied if report is not None and report.compacted is not None else ()
            members[CONTEXT_FIELD] = {"applied_edits": [*before] or turn.applied}
        return Account(receipt, members, recalled)
