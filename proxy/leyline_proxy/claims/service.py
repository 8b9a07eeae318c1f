"""Claims on behalf of callers: commands from their bodies, documents from the engines' replies.

The engines' books are the truth. A caller sees only its own tenant's claims; another tenant's claim
looks like one that never existed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from leyline_engine.contract import (
    Claim,
    ClaimStatus,
    GetClaim,
    GetClaimEvents,
    ListClaims,
    ReleaseClaim,
    SubmitClaim,
)

from ..errors import (
    BadRequestError,
    NotFoundError,
    ProxyError,
    UnsupportedError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from ..model.session import RetainedTurn, Session
from ..request.session_name import public_id
from ..sessions import SessionStore
from ..upstream.client import no_claims
from ..upstream.pool import Names, ReplicaPool
from .documents import (
    CLAIM_ID,
    ClaimBodyError,
    claim_document,
    claim_of,
    event_document,
    predicate_of,
    read_claim,
    read_revision,
    revised,
)
from .engine import ClaimEngine, unknown_claim
from .watch import ClaimWatch


class ClaimService:
    """Takes, changes, shows and releases claims.

    Args:
        watches: by name of the replica.
        allowed: names of the replicas that a tenant may use; None for all.
        hints_secret: see :func:`~.session_name.public_id`.
    """

    def __init__(
        self,
        *,
        store: SessionStore,
        pool: ReplicaPool,
        watches: Mapping[str, ClaimWatch],
        hints_secret: str | None,
        allowed: Callable[[str], Names | None] = lambda _: None,
    ) -> None:
        self._store = store
        self._pool = pool
        self._engines = {each.name: ClaimEngine(each, watches[each.name]) for each in pool}
        self._hints_secret = hints_secret
        self._allowed = allowed

    def at(self, replica: str) -> ClaimEngine:
        """Return the claims of one replica."""
        return self._engines[replica]

    async def submit(self, tenant: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Take a claim over tokens of one of the tenant's sessions, on the engine with their KV.

        Raises:
            NotFoundError: no such session.
            BadRequestError, ConflictError, LimitError, UnsupportedError: the engine refuses.
        """
        await self._taking(tenant)
        try:
            asked = read_claim(body)
            session = await self._session(tenant, asked.session)
            engine = await self._home(session)
            turns = _turns_at(engine, session)
            name = f"c-{uuid4().hex[:20]}"
            claim = claim_of(asked, turns, name=name, tenant=tenant, session=session.id)
        except ClaimBodyError as error:
            raise _invalid(error) from error
        return claim_document(await _submitted(engine, claim))

    async def revise(self, tenant: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Replace a claim with a later revision. Raises as :meth:`submit`."""
        engine, status = await self._found(tenant, name)
        claim = status.claim
        try:
            asked = read_revision(body)
            predicate = claim.predicate
            if asked.predicate:
                session = await self._session(tenant, claim.session)
                predicate = predicate_of(asked.predicate, _turns_at(engine, session))
            later = revised(claim, asked, predicate)
        except ClaimBodyError as error:
            raise _invalid(error) from error
        return claim_document(await _submitted(engine, later))

    async def show(self, tenant: str, name: str) -> dict[str, Any]:
        """Return one claim, also for a while after its end. Raises NotFoundError."""
        _, status = await self._found(tenant, name)
        return claim_document(status)

    async def all_live(self, tenant: str, session: str | None) -> list[dict[str, Any]]:
        """Return the live claims of the tenant or of one session, oldest first for each engine."""
        wanted = public_id(session, self._hints_secret) if session is not None else None
        found: list[ClaimStatus] = []
        for engine in await self._taking(tenant):
            found += (await engine.ask(ListClaims(tenant))).claims
        return [claim_document(s) for s in found if wanted in (None, s.claim.session)]

    async def release(self, tenant: str, name: str) -> dict[str, Any]:
        """End a claim; one that has ended stays unchanged. Raises NotFoundError."""
        engine, status = await self._found(tenant, name)
        if status.state.lives:
            reply = await engine.ask(ReleaseClaim(tenant, name))
            if not reply.claims:
                return await self.show(tenant, name)
            status = reply.claims[0]
        return claim_document(status)

    async def events(self, tenant: str, name: str, after: int, limit: int) -> dict[str, Any]:
        """Return a claim's events after number ``after``, and the number to continue from.

        Raises:
            NotFoundError: no such claim.
        """
        engine, _ = await self._found(tenant, name)
        ended = engine.watch.restart_event((tenant, name))
        if ended is not None:
            found = [event_document(ended)] if after < ended["seq"] else []
            return {"events": found, "seq": ended["seq"]}
        reply = await engine.ask(GetClaimEvents(tenant, name, after, limit))
        engine.watch.told(reply.seq)
        found = [event_document(event) for event in reply.events]
        return {"events": found, "seq": found[-1]["seq"] if len(found) == limit else reply.seq}

    async def _found(self, tenant: str, name: str) -> tuple[ClaimEngine, ClaimStatus]:
        """Return a claim's status and engine; harmed if it was lost with a run of its engine."""
        if CLAIM_ID.broken(name) is not None:
            raise unknown_claim()
        # Ask the last known keeper first; mostly it is the only one asked.
        engines = sorted(await self._taking(tenant), key=lambda each: not each.lives(tenant, name))
        unreachable: ProxyError | None = None
        for engine in engines:
            try:
                reply = await engine.ask(GetClaim(tenant, name))
            except NotFoundError:
                continue
            except (UpstreamUnreachableError, UpstreamTimeoutError) as error:
                unreachable = error
                continue
            if reply.claims:
                return engine, reply.claims[0]
        for engine in engines:
            if engine.lives(tenant, name):
                await engine.watch.look()
            lost = engine.watch.memory.lost((tenant, name))
            if lost is not None:
                return engine, lost
        raise unreachable or unknown_claim()

    async def _session(self, tenant: str, name: str) -> Session:
        session = await self._store.get(tenant, public_id(name, self._hints_secret))
        if session is None or not session.answered:
            raise NotFoundError(
                "No such session; it may have expired.", param="session", code="session_not_found"
            )
        return session

    async def _home(self, session: Session) -> ClaimEngine:
        """Return the engine with the session's newest turn, or else the one that would serve it."""
        runs = (turn.model_fingerprint for turn in reversed(session.turns))
        held = next((found for run in runs if (found := self._pool.holding(run))), None)
        allowed = self._allowed(session.tenant)
        if held is None or (allowed is not None and held.name not in allowed):
            held = await self._pool.choose(session.id, None, allowed=allowed)
        return self._engines[held.name]

    async def _taking(self, tenant: str) -> list[ClaimEngine]:
        """Return the tenant's engines to ask for claims: those that are up, or all if none is.

        Raises:
            UnsupportedError: none takes claims.
            NotFoundError: the tenant may use no engine.
        """
        replicas = self._pool.open_to(self._allowed(tenant))
        engines = [self._engines[replica.name] for replica in replicas]
        await asyncio.gather(*(replica.handshake.current() for replica in replicas))
        up = [each for each in engines if each.status.up]
        taking = [each for each in up if each.status.takes_claims]
        if up and not taking:
            raise no_claims()
        return taking or engines


def _turns_at(engine: ClaimEngine, session: Session) -> Sequence[RetainedTurn]:
    """Return the session's turns whose tokens the engine may still hold, newest last."""
    run = engine.status.retains_as
    return [t for t in session.turns if t.rendered.tokens and t.model_fingerprint == run]


async def _submitted(engine: ClaimEngine, claim: Claim) -> ClaimStatus:
    reply = await engine.ask(SubmitClaim(claim))
    if not reply.claims:
        raise UpstreamUnreachableError("The engine gave no account of a claim that it took.")
    return reply.claims[0]


def _invalid(error: ClaimBodyError) -> ProxyError:
    if error.param == "tenant":
        return UnsupportedError(
            "This tenant can't claim: its name must be visible ASCII, at most 128 characters.",
            code="claims_unsupported",
        )
    return BadRequestError(f"{error}.", param=error.param or None, code="invalid_claim")
