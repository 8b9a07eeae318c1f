"""One chat turn, from the request's bytes to the session's next state.

identify → policies → diff and render → synthesise → (forward, by the HTTP layer) → account.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from time import perf_counter
from typing import Any
from uuid import uuid4

import structlog

from leyline_engine.contract import Receipt, TurnRecord
from leyline_policies import Policy
from leyline_policies.faults import may_forget

from .audit.auditor import Auditor
from .core.context_management import FIELD as CONTEXT_FIELD
from .core.forgetting import is_unvouched, untraced_before
from .core.identity import history_key
from .core.options import UndeclaredRules
from .core.places import owed
from .core.session import RetainedTurn, Session, turn_name
from .errors import RefusedByClaimError
from .live.feed import LiveFeed
from .pipeline.accounting import account_headers, caller_account, final_receipt, forget_result
from .pipeline.cache_scope import check_scope
from .pipeline.erasure import Erasures
from .pipeline.identify import Identity, Openings, identify
from .pipeline.outgoing import outgoing_body, turn_envelope
from .pipeline.pinning import Pinning
from .pipeline.placing import Placing
from .pipeline.planner import Planner
from .pipeline.planning import PlanInput
from .pipeline.prompts import PromptSearch
from .pipeline.records import record_of, record_of_refusal, run_of
from .pipeline.request import OPTIONS_FIELD, ChatRequest
from .pipeline.retaining import session_after, session_owing, session_without, settled_turn
from .pipeline.rules import Chooser, PolicyCatalog, effective_rules
from .pipeline.turn import Turn
from .pipeline.writing import Writing
from .sessions import SessionStore
from .sessions.store import SessionChange
from .telemetry.metrics import Metrics
from .telemetry.tracing.notes import note_refused, note_settled, receipt_span
from .telemetry.turn_counts import Settled, count_forget, count_overhead, count_refused, count_turn
from .upstream.pool import Names, ReplicaPool

log = structlog.get_logger("leyline.turn")


@dataclass(frozen=True, slots=True)
class Account:
    """A settled turn."""

    receipt: Receipt
    members: dict[str, Any]
    """For the response: ``leyline``, and ``context_management`` where that was asked for."""


class TurnService:
    """Begins and settles turns."""

    def __init__(
        self,
        *,
        store: SessionStore,
        pool: ReplicaPool,
        metrics: Metrics,
        planner: Planner,
        erasures: Erasures,
        retained_turns: int,
        audit: Auditor,
        feed: LiveFeed,
        hints_secret: str | None = None,
        history_secret: str | None = None,
        chooser: Chooser | None = None,
        pinning: Pinning | None = None,
    ) -> None:
        self._store = store
        self._open: set[str] = set()
        """Turns that were begun and aren't over."""
        self._pool = pool
        self._placing = Placing(pool)
        self._metrics = metrics
        self._erasures = erasures
        self._audit = audit
        self._feed = feed
        self._retained_turns = retained_turns
        self._hints_secret = hints_secret
        # Without a secret to share, chains mean something in this process alone.
        self._history_key = history_key(history_secret or token_hex())
        self._catalog = PolicyCatalog(chooser)
        self._planner = planner
        self.prompts = PromptSearch(planner, self._catalog)
        self._openings = Openings()
        self._pinning = pinning
        self._writing = Writing(store, metrics, hints_secret=hints_secret, erasures=erasures)

    async def aclose(self) -> None:
        """Give up what runs beside the requests."""
        await self._writing.aclose()
        if self._pinning is not None:
            await self._pinning.aclose()

    async def begin(
        self,
        request: ChatRequest,
        avoid: Names = frozenset(),
        *,
        again: Turn | None = None,
        parsed_s: float = 0.0,
    ) -> Turn:
        """Steps 1 to 5: what to send, where to, and what to ask of the engine.

        Args:
            avoid: replicas that have failed this request.
            again: the same request as the last of them was given it.
            parsed_s: seconds that the request has taken so far, but for waiting.

        Raises:
            NotFoundError: no engine serves the model.
            BadRequestError, ForbiddenError: the request's ``leyline`` options.
        """
        await self._pool.check_model(request.model, request.tenant.upstreams)
        started = perf_counter()
        policies, rules = effective_rules(request, self._catalog)
        with self._metrics.stage("identify"):
            identity = await self._identify(request, again)
        own_s = perf_counter() - started + (parsed_s if again is None else again.own_s)
        try:
            return await self._begin(request, identity, (policies, rules), avoid, own_s)
        except BaseException:
            self._openings.leave(identity.hold)
            raise

    async def _begin(
        self,
        request: ChatRequest,
        identity: Identity,
        effective: tuple[Sequence[Policy], UndeclaredRules],
        avoid: Names,
        own_s: float,
    ) -> Turn:
        policies, rules = effective
        replica = await self._pool.choose(
            identity.session_id, request.model, allowed=request.tenant.upstreams, avoid=avoid
        )
        chosen, status = perf_counter(), replica.status
        check_scope(request.tenant, status)
        session = identity.session
        index = session.next_index if session is not None else 0
        name, message_id = turn_name(index, uuid4().hex[:12]), f"m-{uuid4().hex}"
        rules, named = replace(rules, trust=identity.trust), identity.named
        allowed = request.tenant.upstreams
        traced = named and (
            session is not None or self._placing.all_take_forgets(request.model, allowed)
        )
        given = PlanInput(
            name,
            request,
            policies,
            rules,
            session,
            status,
            index,
            replica=replica.name,
            named=named,
            traced=traced,
        )
        planned = await self._planner.plan(given, identity.session_id, replica)
        if planned.plan.forgets:
            self._erasures.check(request.tenant.name)
        envelope = turn_envelope(
            given, planned, identity.session_id, message_id, secret=self._hints_secret
        )
        if envelope is not None:
            await self._open_turn(identity, given)
        elif planned.plan.forgets:
            self._open.add(name)  # other engines owe what it demands, whatever becomes of it
        return Turn(
            request=request,
            identity=identity,
            index=index,
            name=name,
            message_id=message_id,
            planned=planned,
            replica=replica,
            status=status,
            body=outgoing_body(request.raw, planned.prepared, envelope, request.tenant.cache_salt),
            enveloped=envelope is not None,
            unnamed=session.unnamed if session is not None else 0,
            unvouched=is_unvouched(session, named=named),
            demands=session.demands if session is not None else 0,
            untraced=untraced_before(planned.prepared, session, traced=traced),
            searched=any(map(may_forget, given.policies)),
            applied=self._planner.applied(given, planned.prepared),
            own_s=own_s + perf_counter() - chosen - planned.asked_s,
            ahead_s=perf_counter() - request.arrived,
        )

    async def _open_turn(self, identity: Identity, given: PlanInput) -> None:
        """Note that an engine may hold something of the turn from here on, whatever becomes of this
        proxy."""
        place = given.request.tenant.name, identity.session_id
        run, session = given.status.retains_as, given.session
        await self._store.open_turn(
            *place, given.turn, identity.key, run=run, replica=given.replica
        )
        self._open.add(given.turn)
        if session is not None and run not in session.places:
            await self._store.update(
                *place, lambda found: self._placing.begun(found or session, run, given.replica)
            )

    async def _identify(self, request: ChatRequest, again: Turn | None) -> Identity:
        """The session of a request, which stays the same when another engine is tried."""
        if again is None:
            return await identify(
                self._store,
                request,
                self._history_key,
                secret=self._hints_secret,
                openings=self._openings,
            )
        known = again.identity
        session = await self._store.get(request.tenant.name, known.session_id)
        hold = self._openings.take(known.hold) if known.hold is not None else None
        return replace(known, session=session, hold=hold)

    async def count_prompt(self, request: ChatRequest) -> dict[str, Any]:
        """How many prompt tokens a request would have, without sending it.

        Raises:
            NotFoundError: no engine serves the model.
            BadRequestError, ForbiddenError: the request's ``leyline`` options.
            UnsupportedError: nobody can tell: the engine's chat template isn't known.
        """
        allowed = request.tenant.upstreams
        await self._pool.check_model(request.model, allowed)
        policies, rules = effective_rules(request, self._catalog)
        identity = await identify(
            self._store, request, self._history_key, secret=self._hints_secret
        )
        replica = await self._pool.choose(identity.session_id, request.model, allowed=allowed)
        status, session = replica.status, identity.session
        index = session.next_index if session is not None else 0
        given = PlanInput("count", request, policies, rules, session, status, index)
        known = identity.session_id if session is not None else None
        return await self._planner.count(given, known, replica)

    def model_label(self, model: str | None) -> str:
        """``model`` as a metric label."""
        return self._pool.label(model)

    def preview(self, turn: Turn, usage: Mapping[str, Any] | None) -> Account:
        """The account of a turn that isn't settled yet."""
        return self._account(turn, final_receipt(turn, None, usage), turn.identity.session)

    async def settle(
        self,
        turn: Turn,
        usage: Mapping[str, Any] | None,
        *,
        ttft_s: float | None,
        came: TurnRecord | None = None,
    ) -> Account:
        """Step 7 for a turn that the engine has answered in full.

        Args:
            came: the record that came with the answer.
        """
        deadline = turn.replica.records.deadline()
        with receipt_span(usage):
            record = await record_of(turn, came, deadline)
        receipt = final_receipt(turn, record, usage)
        run = await run_of(turn, record, receipt, deadline)
        told = perf_counter()
        with self._metrics.stage("account"):
            session, source = await self._retain(turn, record, receipt, run)
            label = self.model_label(turn.request.model)
            avoided_s = self._planner.avoided_s(label, receipt)
            settled = Settled(turn, receipt, record, usage, ttft_s, avoided_s)
            count_turn(self._metrics, settled, label)
            count_forget(
                self._metrics, turn, forget_result(turn, receipt, len(owed(session.places)))
            )
            note_settled(turn, receipt, ttft_s)
            streamed = turn.request.stream and ttft_s is not None
            self._planner.learn(label, receipt, (ttft_s or 0) - turn.ahead_s if streamed else None)
        if turn.planned.prepared.wanted:
            self._writing.start(turn)
        account = self._account(turn, receipt, session)
        self._erasures.start(session)
        self._audit.settled(turn, record, receipt, session, label)
        self._feed.settled(session)
        if self._pinning is not None and source is not None:
            self._pinning.start(turn, source)
        count_overhead(self._metrics, turn, perf_counter() - told)
        log.info(
            "turn",
            tenant=turn.request.tenant.name,
            session=turn.identity.session_id,
            turn=turn.index,
            outcome=receipt.outcome.value,
            reason=receipt.reason.value if receipt.reason else None,
            prompt_tokens=receipt.tokens.prompt,
            cached_tokens=receipt.tokens.prefix,
            spliced_tokens=receipt.tokens.spliced,
            edits=len(turn.planned.plan.edits),
            faults=len(turn.planned.prepared.faults),
            ms=round((perf_counter() - turn.request.arrived) * 1000, 1),
        )
        return account

    async def refusal(self, turn: Turn) -> RefusedByClaimError | None:
        """Why the engine didn't run a turn, or not to its end, where that is for the sake of
        claims; counts it then. The turn isn't retained."""
        if not turn.enveloped or not turn.status.takes_claims:
            return None
        record = await record_of_refusal(turn)
        refused = record.receipt.refused if record is not None else None
        if record is None or refused is None:
            return None
        receipt, tenant = record.receipt, turn.request.tenant.name
        label = self.model_label(turn.request.model)
        count_refused(self._metrics, turn, receipt, label)
        note_refused(receipt)
        self._audit.refused(turn, receipt, label)
        self._feed.lost(tenant, turn.identity.session_id, "refused")
        log.info(
            "turn_refused",
            tenant=tenant,
            session=turn.identity.session_id,
            own_claims=len(refused.own),
            other_claims=refused.others,
        )
        headers = account_headers(receipt)
        return RefusedByClaimError(refused.own, refused.others, refused.retry_after_ms, headers)

    async def _retain(
        self, turn: Turn, record: TurnRecord | None, receipt: Receipt, run: str
    ) -> tuple[Session, RetainedTurn | None]:
        """Take the turn into its session; returns both, the turn if it is a source."""
        settled = settled_turn(turn, record, receipt, run)
        now, keep = time.time(), self._retained_turns

        def change(session: Session | None) -> Session:
            return session_after(session, settled, self._placing, keep=keep, now=now)

        place = turn.request.tenant.name, turn.identity.session_id
        session = await self._store.update(*place, change, turn.identity.chain, ends=turn.name)
        self._open.discard(turn.name)
        # Its client may send the next turn before this one's connection is done with.
        self._openings.leave(turn.identity.hold)
        return session, settled.source if turn.enveloped else None

    def _account(self, turn: Turn, receipt: Receipt, session: Session | None) -> Account:
        pins = self._pinning.refusals(turn) if self._pinning is not None else ()
        waiting = len(owed(session.places)) if session is not None else 0
        account = caller_account(turn, receipt, pins, waiting)
        members = {OPTIONS_FIELD: account}
        if turn.request.requested:
            members[CONTEXT_FIELD] = {"applied_edits": turn.applied}
        return Account(receipt, members)

    async def abandon(self, turn: Turn) -> None:
        """Note a turn that went to the engine and won't be settled: its client has gone, or its
        answer broke off. What the engine read in it has no names here."""
        self._audit.abandoned(turn, self.model_label(turn.request.model))
        self._feed.lost(turn.request.tenant.name, turn.identity.session_id, "abandoned")
        now = time.time()

        def change(session: Session | None) -> Session:
            return session_without(session, turn, self._placing, now=now)

        await self._unsettled(turn, change)

    async def release(self, turn: Turn) -> None:
        """Take back that an engine may hold something of a turn: it ended, and no engine does.

        What it demanded to be forgotten is owed all the same."""
        self._openings.leave(turn.identity.hold)
        if turn.name not in self._open:
            return
        if turn.planned.plan.forgets:
            now = time.time()

            def change(session: Session | None) -> Session:
                return session_owing(session, turn, self._placing, now=now)

            await self._unsettled(turn, change)
            return
        self._open.discard(turn.name)
        place = turn.request.tenant.name, turn.identity.session_id
        await self._store.close_turn(*place, turn.name)

    async def _unsettled(self, turn: Turn, change: SessionChange) -> None:
        """Leave a turn without an answer in its session, and carry what that owes."""
        # A session that is known keeps the history that it was answered for.
        chain = turn.identity.chain if turn.identity.session is None else None
        place = turn.request.tenant.name, turn.identity.session_id
        session = await self._store.update(*place, change, chain, ends=turn.name)
        self._open.discard(turn.name)
        if turn.planned.plan.forgets:
            count_forget(self._metrics, turn, "owed")
        self._erasures.start(session)
