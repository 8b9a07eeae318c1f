"""Claims on behalf of callers: their bodies to commands, the engine's replies to documents.

The engine's book is the truth. A caller sees its own tenant's claims only: what is another's is as
unknown as what never was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from leyline_engine.contract import (
    Claim,
    ClaimCommand,
    ClaimProblem,
    ClaimReply,
    ClaimStatus,
    GetClaim,
    GetClaimEvents,
    ListClaims,
    ProblemCode,
    ReleaseClaim,
    SubmitClaim,
)

from ..core.claims import (
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
from ..core.session import RetainedTurn
from ..errors import (
    BadRequestError,
    ConflictError,
    LimitError,
    NotFoundError,
    ProxyError,
    UnsupportedError,
    UpstreamUnreachableError,
)
from ..sessions import SessionStore
from ..upstream.client import UpstreamClient, no_claims
from ..upstream.handshake import Handshake
from .claim_watch import ClaimWatch
from .identify import public_id


class ClaimService:
    """Takes, changes, shows and releases claims.

    Args:
        hints_secret: see :func:`~.identify.public_id`.
    """

    def __init__(
        self,
        *,
        store: SessionStore,
        upstream: UpstreamClient,
        handshake: Handshake,
        watch: ClaimWatch,
        hints_secret: str | None,
    ) -> None:
        self._store = store
        self._upstream = upstream
        self._handshake = handshake
        self._watch = watch
        self._hints_secret = hints_secret

    async def submit(self, tenant: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Take a claim over tokens of one of the tenant's sessions.

        Raises:
            NotFoundError: no such session.
            BadRequestError, ConflictError, LimitError, UnsupportedError: as :meth:`_refused`.
        """
        await self._check_engine()
        try:
            asked = read_claim(body)
            session, turns = await self._session(tenant, asked.session)
            name = f"c-{uuid4().hex[:20]}"
            claim = claim_of(asked, turns, name=name, tenant=tenant, session=session)
        except ClaimBodyError as error:
            raise _invalid(error) from error
        return claim_document(await self._submit(claim))

    async def revise(self, tenant: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Put a later revision in a claim's place. Raises as :meth:`submit`."""
        claim = (await self._status(tenant, name)).claim
        try:
            asked = read_revision(body)
            predicate = claim.predicate
            if asked.predicate:
                _, turns = await self._session(tenant, claim.session)
                predicate = predicate_of(asked.predicate, turns)
            later = revised(claim, asked, predicate)
        except ClaimBodyError as error:
            raise _invalid(error) from error
        return claim_document(await self._submit(later))

    async def show(self, tenant: str, name: str) -> dict[str, Any]:
        """One claim, also for a while after its end. Raises NotFoundError."""
        return claim_document(await self._status(tenant, name))

    async def all_live(self, tenant: str, session: str | None) -> list[dict[str, Any]]:
        """The tenant's live claims, oldest first; of one session, if one is named."""
        reply = await self._ask(ListClaims(tenant))
        wanted = public_id(session, self._hints_secret) if session is not None else None
        found = (s for s in reply.claims if wanted in (None, s.claim.session))
        return [claim_document(status) for status in found]

    async def release(self, tenant: str, name: str) -> dict[str, Any]:
        """End a claim; one that has ended stays as it ended. Raises NotFoundError."""
        status = await self._status(tenant, name)
        if status.state.lives:
            reply = await self._ask(ReleaseClaim(tenant, name))
            status = reply.claims[0] if reply.claims else await self._status(tenant, name)
        return claim_document(status)

    async def events(self, tenant: str, name: str, after: int, limit: int) -> dict[str, Any]:
        """A claim's events behind number ``after``, and the number to go on from.

        Raises:
            NotFoundError: no such claim.
        """
        await self._status(tenant, name)
        ended = self._watch.restart_event((tenant, name))
        if ended is not None:
            found = [event_document(ended)] if after < ended["seq"] else []
            return {"events": found, "seq": ended["seq"]}
        reply = await self._ask(GetClaimEvents(tenant, name, after, limit))
        self._watch.told(reply.seq)
        found = [event_document(event) for event in reply.events]
        return {"events": found, "seq": found[-1]["seq"] if len(found) == limit else reply.seq}

    def lives(self, tenant: str, name: str) -> bool:
        """Whether a claim was live when last seen."""
        return self._watch.memory.lives((tenant, name))

    async def send(self, command: ClaimCommand) -> ClaimReply:
        """The engine's reply to a command, problem or not. Raises ProxyError."""
        if isinstance(command, SubmitClaim):
            await self._watch.ready()
        reply = await self._upstream.claims(command)
        for status in reply.claims:
            self._watch.memory.note(status)
        if isinstance(command, SubmitClaim | ReleaseClaim):
            self._watch.wake()
        return reply

    async def _submit(self, claim: Claim) -> ClaimStatus:
        reply = await self._ask(SubmitClaim(claim))
        if not reply.claims:
            raise UpstreamUnreachableError("The engine gave no account of a claim that it took.")
        return reply.claims[0]

    async def _status(self, tenant: str, name: str) -> ClaimStatus:
        """A claim as it stands; harmed, where it went with an earlier run of the engine."""
        if not CLAIM_ID.fullmatch(name):
            raise _unknown()
        try:
            reply = await self._ask(GetClaim(tenant, name))
        except NotFoundError:
            if self._watch.memory.lives((tenant, name)):
                await self._watch.look()
            lost = self._watch.memory.lost((tenant, name))
            if lost is None:
                raise
            return lost
        if not reply.claims:
            raise _unknown()
        return reply.claims[0]

    async def _session(self, tenant: str, name: str) -> tuple[str, list[RetainedTurn]]:
        """A session's id, and its turns whose tokens the engine may still hold, newest last."""
        session_id = public_id(name, self._hints_secret)
        session = await self._store.get(tenant, session_id)
        if session is None or not session.answered:
            raise NotFoundError(
                "No such session; it may have expired.", param="session", code="session_not_found"
            )
        run = self._handshake.status.retains_as
        turns = [t for t in session.turns if t.rendered.tokens and t.model_fingerprint == run]
        return session_id, turns

    async def _check_engine(self) -> None:
        status = await self._handshake.current()
        if status.up and not status.takes_claims:
            raise no_claims()

    async def _ask(self, command: ClaimCommand) -> ClaimReply:
        """The engine's reply to a command that it carried out."""
        await self._check_engine()
        try:
            reply = await self.send(command)
        except UpstreamUnreachableError:
            self._handshake.report_failure()
            raise
        if reply.problem is not None:
            raise _refused(reply.problem)
        return reply


def _refused(problem: ClaimProblem) -> ProxyError:
    """What a caller is told of a command that the engine wouldn't carry out."""
    code, text = problem.code, problem.message
    if code is ProblemCode.UNKNOWN_CLAIM:
        return _unknown()
    if code is ProblemCode.UNSUPPORTED:
        return no_claims()
    if code is ProblemCode.CLAIM_LIMIT:
        return LimitError(text, param=problem.field or None, code=code.value)
    if code is ProblemCode.STALE_REVISION:
        return ConflictError(text, param="revision", code=code.value)
    if code is ProblemCode.NOT_LOCKED:
        return ConflictError(text, code=code.value)
    return BadRequestError(text, param=problem.field or None, code=code.value)


def _invalid(error: ClaimBodyError) -> ProxyError:
    if error.param == "tenant":
        return UnsupportedError(
            "This tenant can't claim: its name must be visible ASCII, at most 128 characters.",
            code="claims_unsupported",
        )
    return BadRequestError(f"{error}.", param=error.param or None, code="invalid_claim")


def _unknown() -> NotFoundError:
    return NotFoundError("No such claim; it may have ended long ago.", code="claim_not_found")
