"""The start of a turn: its session, the messages to send, and the request to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import anyio

from leyline_policies import Policy
from leyline_policies.context import Completion
from leyline_policies.faults import may_forget

from ..edits.rules import PolicyCatalog, effective_rules, reasoning_edits
from ..model.history import history_chain
from ..model.session import Session, turn_name
from ..model.text_memory import Reader
from ..model.undeclared import UndeclaredRules
from ..plan.forgetting import is_unvouched, untraced_before
from ..plan.outgoing import outgoing_body, turn_envelope
from ..plan.plan_input import PlanInput
from ..plan.planner import INLINE_BYTES, Planner
from ..plan.planning import Planned
from ..request.bodies import BodyMemory
from ..request.identify import Identity, demands_forget, identify, sent_before
from ..request.parse import ChatRequest
from ..request.tool_order import in_first_order, keeps_order
from ..sessions import SessionStore
from ..telemetry.metrics import Metrics
from ..upstream.pool import Names, ReplicaPool
from ..upstream.replica import Replica
from .cache_scope import check_scope
from .erasure import Erasures
from .named import NamedSources
from .predecessors import Predecessors
from .questions import SessionMovedError, check_place, question_list, question_request, refuses
from .replanning import RecallPlans
from .retaining import known
from .routing import Routing, home_of
from .turn import Turn
from .under_way import TurnsUnderWay


class TurnOpener:
    """Begins turns; also searches and counts requests that aren't turns.

    Args:
        named: names content of other sessions.
        hints_secret: shared with the engine, which ignores envelopes that aren't signed with it.
        history_key: keys the histories by which sessions without a name are found.
        plans: plans turns, with what is put back into them.
        predecessors: finds sessions that new ones continue.
        routing: knows the engines behind routers.
        erasures: remembers the forgets that turns demand, in case that this process dies.
        bodies: remembers the bodies of turns; None for none.
    """

    def __init__(
        self,
        *,
        under_way: TurnsUnderWay,
        store: SessionStore,
        pool: ReplicaPool,
        planner: Planner,
        catalog: PolicyCatalog,
        metrics: Metrics,
        named: NamedSources,
        hints_secret: str | None,
        history_key: bytes,
        plans: RecallPlans,
        predecessors: Predecessors,
        routing: Routing,
        erasures: Erasures,
        bodies: BodyMemory | None = None,
    ) -> None:
        self._bodies = bodies
        self._under_way = under_way
        self._store = store
        self._pool = pool
        self._placing = under_way.placing
        self._planner = planner
        self._catalog = catalog
        self._metrics = metrics
        self._named = named
        self._hints_secret = hints_secret
        self._history_key = history_key
        self._plans = plans
        self._predecessors = predecessors
        self._routing = routing
        self._erasures = erasures

    async def begin(
        self, request: ChatRequest, avoid: Names = frozenset(), *, again: Turn | None = None
    ) -> Turn:
        """Find the messages to send, the engine, and the request to it.

        Args:
            avoid: replicas that have failed this request.
            again: the same request's turn before this one: at the last of these replicas, or with
                other messages, in whose session this one is, too.

        Raises:
            NotFoundError: no engine serves the model.
            BadRequestError, ForbiddenError: the request's ``leyline`` options.
        """
        await self._pool.check_model(request.model, request.tenant.upstreams)
        with request.clock.working():
            effective = await effective_rules(request, self._catalog)
            with self._metrics.stage("identify"):
                identity = await self._identify(request, again)
            identity = await self._sender(request, identity, effective, avoid)
            request = await self._of_session(request, identity)
        try:
            replica = await self._chosen(request, identity, avoid)
            with request.clock.working():
                turn = await self._planned(request, identity, effective, replica)
            request.clock.sent()
            self._under_way.watch.begun(turn)
            return turn
        except BaseException:
            self._under_way.openings.leave(identity.hold)
            raise

    async def _chosen(self, request: ChatRequest, identity: Identity, avoid: Names) -> Replica:
        """Return the engine for a session's turn."""
        return await self._pool.choose(
            identity.session_id,
            request.model,
            allowed=request.tenant.upstreams,
            avoid=avoid,
            home=home_of(identity.session),
        )

    async def _sender(
        self,
        request: ChatRequest,
        identity: Identity,
        effective: tuple[Sequence[Policy], UndeclaredRules],
        avoid: Names,
    ) -> Identity:
        """Return the session that sent a new conversation's list before, if the request demands
        that it forgets some of it; else the identity as it is."""
        may = demands_forget(request) or any(map(may_forget, effective[0]))
        if identity.session is not None or identity.named or not may:
            return identity
        openings = self._under_way.openings
        found = await sent_before(self._store, request, identity, openings)
        if found is None:
            return identity
        demanded = False
        try:
            replica = await self._chosen(request, found, avoid)
            given = self._input(request, found, effective, replica)
            given = await self._plans.with_texts(given, found)
            planned = await self._planner.plan(given, found.session_id, replica)
            demanded = bool(planned.plan.forgets or planned.plan.unreachable)
        finally:
            if not demanded:
                openings.leave(found.hold)
        return found if demanded else identity

    async def _planned(
        self,
        request: ChatRequest,
        identity: Identity,
        effective: tuple[Sequence[Policy], UndeclaredRules],
        replica: Replica,
    ) -> Turn:
        check_scope(request.tenant, replica.status)
        self._routing.check_scope(request.tenant, replica)
        given = self._input(request, identity, effective, replica)
        given = replace(given, before=await self._predecessors.of(request, identity))
        given, planned = await self._plans.plan(given, identity, replica)
        return await self._turn(given, planned, identity, replica)

    async def ask(self, turn: Turn, wanted: Completion, settled: Session) -> Turn:
        """Begin a turn that puts a policy's question after the list that another turn has sent.

        Args:
            turn: it has ended.
            settled: the session after it.

        Raises:
            SessionGoneError: the session has expired since.
            SessionMovedError: its engine has forgotten the session since, or is about to.
        """
        request, identity, replica = turn.request, turn.identity, turn.replica
        session = known(await self._store.get(request.tenant.name, identity.session_id))
        check_place(session, turn.status.retains_as, settled=settled)
        asked = question_request(turn, wanted)
        # It holds nobody's place: the client may go on meanwhile.
        identity = replace(identity, session=session, hold=None)
        rules = await effective_rules(asked, self._catalog)
        given = self._input(asked, identity, rules, replica)
        given = replace(given, policies=())
        with asked.clock.working():
            planned = await self._planner.plan_edited(given, question_list(turn, wanted), replica)
            if refuses(turn, planned):
                joined = question_list(turn, wanted, joined=True)
                planned = await self._planner.plan_edited(given, joined, replica)
            if planned.plan.forgets or given.status.retains_as != turn.status.retains_as:
                raise SessionMovedError
            opened = await self._turn(given, planned, identity, replica)
        asked.clock.sent()
        self._under_way.watch.begun(opened)
        return replace(opened, asks=wanted)

    async def _turn(
        self, given: PlanInput, planned: Planned, identity: Identity, replica: Replica
    ) -> Turn:
        request, session, message_id = given.request, given.session, f"m-{uuid4().hex}"
        envelope = turn_envelope(
            given,
            planned,
            identity.session_id,
            message_id,
            named=self._named.copies_for(given, planned, identity.session_id),
            secret=self._hints_secret,
        )
        if envelope is not None:
            await self._under_way.open(identity, given)
        elif planned.plan.forgets:
            # Other engines owe its demands in any case.
            self._under_way.expect(given.turn)
        turn = Turn(
            request=request,
            identity=identity,
            index=given.index,
            name=given.turn,
            message_id=message_id,
            planned=planned,
            replica=replica,
            status=given.status,
            body=outgoing_body(
                request,
                planned.prepared,
                envelope,
                request.tenant.cache_salt,
                carried=replica.router is not None and replica.status.unpacks,
            ),
            enveloped=envelope is not None,
            unnamed=session.unnamed if session is not None else 0,
            unvouched=is_unvouched(session, named=given.named),
            demands=session.demands if session is not None else 0,
            untraced=untraced_before(planned.prepared, session, traced=given.traced),
            searched=any(map(may_forget, given.policies)),
            applied=self._planner.applied(given, planned.prepared),
            appended=given.appended,
            told=given.told,
        )
        if planned.plan.forgets:
            await self._erasures.demanded(
                (request.tenant.name, identity.session_id),
                turn.name,
                self._under_way.placing.concerned(session, turn),
            )
        return turn

    def _input(
        self,
        request: ChatRequest,
        identity: Identity,
        effective: tuple[Sequence[Policy], UndeclaredRules],
        replica: Replica,
    ) -> PlanInput:
        policies, rules = effective
        session, named = identity.session, identity.named
        index = session.next_index if session is not None else 0
        traced = named and (
            session is not None
            or self._placing.all_take_forgets(request.model, request.tenant.upstreams)
        )
        return PlanInput(
            turn_name(index, uuid4().hex[:12]),
            request,
            policies,
            replace(
                rules,
                trust=identity.trust,
                reasoning=reasoning_edits(request, rules, replica.status.profile),
            ),
            session,
            replica.status,
            index,
            replica=replica.name,
            named=named,
            traced=traced,
            retells=identity.retells,
        )

    async def _of_session(self, request: ChatRequest, identity: Identity) -> ChatRequest:
        """Return a request that makes its session's prompt, and remember its body."""
        session = identity.session
        demands = session.demands if session is not None else 0
        reader = Reader(request.tenant.name, identity.session_id, demands)
        if self._bodies is not None and request.read is not None:
            self._bodies.remember(reader, request.read)
        return await _ordered(replace(request, reader=reader), session)

    async def _identify(self, request: ChatRequest, again: Turn | None) -> Identity:
        """Return the session of a request; it stays the same if another engine is tried."""
        if again is None:
            return await identify(
                self._store,
                request,
                self._history_key,
                secret=self._hints_secret,
                openings=self._under_way.openings,
            )
        known = again.identity
        session = await self._store.get(request.tenant.name, known.session_id)
        hold = self._under_way.openings.take(known.hold) if known.hold is not None else None
        chain = known.chain
        if chain and request.fingerprints != again.request.fingerprints:
            chain = (*history_chain(request.fingerprints, self._history_key),)
        return replace(known, session=session, hold=hold, chain=chain)

    async def count_prompt(self, request: ChatRequest) -> dict[str, Any]:
        """Count the prompt tokens of a request, without sending it.

        Raises:
            NotFoundError: no engine serves the model.
            BadRequestError, ForbiddenError: the request's ``leyline`` options.
            LongPromptError, TokensRefusedError, UnsupportedError: see :meth:`Planner.count`.
        """
        allowed = request.tenant.upstreams
        await self._pool.check_model(request.model, allowed)
        policies, rules = await effective_rules(request, self._catalog)
        identity = await identify(
            self._store, request, self._history_key, secret=self._hints_secret
        )
        replica = await self._pool.choose(
            identity.session_id, request.model, allowed=allowed, home=home_of(identity.session)
        )
        status, session = replica.status, identity.session
        index = session.next_index if session is not None else 0
        reader = Reader(request.tenant.name, session.id if session is not None else "")
        request = await _ordered(replace(request, reader=reader), session)
        given = PlanInput("count", request, policies, rules, session, status, index)
        given = await self._plans.with_texts(given, identity)
        known = identity.session_id if session is not None else None
        return await self._planner.count(given, known, replica)


async def _ordered(request: ChatRequest, session: Session | None) -> ChatRequest:
    """Return a request with its tools in the order that its session keeps."""
    if session is None or not session.tools or not keeps_order(request):
        return request
    work = partial(in_first_order, request, session.tools)
    return work() if len(request.raw) <= INLINE_BYTES else await anyio.to_thread.run_sync(work)
