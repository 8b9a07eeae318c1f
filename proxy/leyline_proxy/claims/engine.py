"""One engine's claims: commands to it, and the memory of its answers."""

from __future__ import annotations

from leyline_engine.contract import (
    ClaimCommand,
    ClaimProblem,
    ClaimReply,
    ProblemCode,
    ReleaseClaim,
    SubmitClaim,
)

from ..errors import (
    BadRequestError,
    ConflictError,
    LimitError,
    NotFoundError,
    ProxyError,
    UpstreamUnreachableError,
)
from ..upstream.client import no_claims
from ..upstream.handshake import UpstreamStatus
from ..upstream.replica import Replica
from .watch import ClaimWatch


class ClaimEngine:
    """A replica as the keeper of claims."""

    def __init__(self, replica: Replica, watch: ClaimWatch) -> None:
        self.watch = watch
        self._replica = replica

    @property
    def name(self) -> str:
        """The replica's name."""
        return self._replica.name

    @property
    def status(self) -> UpstreamStatus:
        """The engine's known status."""
        return self._replica.status

    def lives(self, tenant: str, name: str) -> bool:
        """Return True if a claim was live when last seen."""
        return self.watch.memory.lives((tenant, name))

    async def send(self, command: ClaimCommand) -> ClaimReply:
        """Return the engine's reply to a command, problem or not. Raises ProxyError."""
        if isinstance(command, SubmitClaim):
            await self.watch.ready()
        reply = await self._replica.client.claims(command)
        for status in reply.claims:
            self.watch.memory.note(status)
        if isinstance(command, SubmitClaim | ReleaseClaim):
            self.watch.wake()
        return reply

    async def ask(self, command: ClaimCommand) -> ClaimReply:
        """Return the engine's reply to a command that it carried out.

        Raises:
            UnsupportedError: it takes no claims.
            ProxyError: it can't be reached, or didn't carry the command out.
        """
        status = await self._replica.handshake.current()
        if status.up and not status.takes_claims:
            raise no_claims()
        try:
            reply = await self.send(command)
        except UpstreamUnreachableError:
            self._replica.handshake.report_failure()
            raise
        if reply.problem is not None:
            raise refused(reply.problem)
        return reply


def refused(problem: ClaimProblem) -> ProxyError:
    """Return the caller's error for a command that the engine didn't carry out."""
    code, text = problem.code, problem.message
    if code is ProblemCode.UNKNOWN_CLAIM:
        return unknown_claim()
    if code is ProblemCode.UNSUPPORTED:
        return no_claims()
    if code is ProblemCode.CLAIM_LIMIT:
        return LimitError(text, param=problem.field or None, code=code.value)
    if code is ProblemCode.STALE_REVISION:
        return ConflictError(text, param="revision", code=code.value)
    if code is ProblemCode.NOT_LOCKED:
        return ConflictError(text, code=code.value)
    return BadRequestError(text, param=problem.field or None, code=code.value)


def unknown_claim() -> NotFoundError:
    """Return the error for a claim that doesn't exist or is another tenant's."""
    return NotFoundError("No such claim; it may have ended long ago.", code="claim_not_found")
