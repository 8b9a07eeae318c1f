"""Claims in one scheduler: commands as they come to it, and refusals of requests.

Shared by the engines whose scheduler is a process of its own. A request that can't fit beside the
hard claims is refused before it runs. Waiting requests are checked again after each command, so
that none waits for a claim.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from leyline_engine.admit.rules import CheckedRequest
from leyline_engine.claims.keeper import ArrivingRequest, ClaimKeeper
from leyline_engine.claims.limits import Limits
from leyline_engine.contract import (
    ClaimProblem,
    ClaimRefusal,
    ClaimReply,
    ProblemCode,
    decode_command,
)
from leyline_engine.records.publications import Publication
from leyline_engine.records.sources import SessionKey, SourceTurn
from leyline_engine.server.claim_clock import ClaimAnswer, ClaimMessage

LIMITS_VARIABLE = "LEYLINE_CLAIM_LIMITS"
"""Environment variable: ``{"share": 0.5, …}``, fields of :class:`~.claims.limits.Limits`."""

NO_ADMIT = "a claim keeps what this session computes out of the cache"


class ClaimDesk:
    """Claims of one scheduler.

    Args:
        obstacle: why the server takes no claims, and the fix; empty if it does.
    """

    def __init__(self, keeper: ClaimKeeper, obstacle: str = "") -> None:
        self.keeper = keeper
        self.obstacle = obstacle
        self.recheck = False
        """True if a waiting request may have become one that can't run."""

    def carry_out(self, message: ClaimMessage) -> ClaimAnswer:
        """Advance the clock, and carry out the command."""
        self.keeper.tick(message.order, message.now_ms)
        reply = ClaimReply()
        if message.command:
            reply = self._reply(message.command)
            self.recheck = True
        return ClaimAnswer(message.order, reply, self.keeper.book.next_deadline_ms)

    def _reply(self, command: str) -> ClaimReply:
        if self.obstacle:
            return ClaimReply(problem=ClaimProblem(ProblemCode.UNSUPPORTED, self.obstacle))
        try:
            return self.keeper.carry_out(decode_command(command.encode()))
        except (msgspec.DecodeError, RecursionError) as error:
            return ClaimReply(problem=ClaimProblem(ProblemCode.INVALID_CLAIM, str(error)))

    def refuse(
        self, request: ArrivingRequest, matched: Callable[[], Sequence[int]]
    ) -> ClaimRefusal | None:
        """Return why a request can't run before a claim ends.

        Args:
            matched: returns the slots of its cached prefix.
        """
        return self.keeper.refuse(request, matched)

    def blocks(self, request: ArrivingRequest, matched: Callable[[], Sequence[int]]) -> bool:
        """Return True if :meth:`refuse` would refuse; nothing is recorded."""
        return self.keeper.blocks(request, matched)

    def retained(self, source: SourceTurn, checked: CheckedRequest) -> None:
        """Record that a turn became a source: its session's claims follow the tokens it spliced."""
        if not self.keeper or checked.edit is None or checked.only_reuses:
            return
        self.keeper.follow(source, checked.edit.sources, checked.edit.own_copies)
        # Moved claims may lock more than before, where they lay over another claim.
        self.recheck = True

    def paths(self, session: SessionKey) -> list[Publication]:
        """Return the paths that a session's claims hold or rank: a retirement spares them."""
        places = (each for each in self.keeper.places.values() if each.session == session)
        return [Publication.of_turn(each.turn).cut(len(each.keys)) for each in places]


def explain(refusal: ClaimRefusal) -> str:
    """Return a refusal as a sentence, for the request's owner."""
    own = f", of which yours: {', '.join(refusal.own)}" if refusal.own else ""
    count = len(refusal.own) + refusal.others
    wait = (
        "one of them is released"
        if refusal.retry_after_ms is None
        else f"{-(-refusal.retry_after_ms // 1000)} s have passed"
    )
    return (
        f"refused_by_claim: the request needs {refusal.needed} tokens of KV, and {count} claims "
        f"leave {refusal.usable - refusal.protected} of {refusal.usable}{own}. "
        f"It can run when {wait}."
    )


def limits_from(environment: Mapping[str, str] = os.environ) -> Limits:
    """Return the limits that the operator set.

    Raises:
        ValueError: they can't be read; the text names the variable and the field.
    """
    text = environment.get(LIMITS_VARIABLE)
    if not text:
        return Limits()
    try:
        return msgspec.json.decode(text, type=Limits)
    except msgspec.DecodeError as error:
        raise ValueError(f"{LIMITS_VARIABLE}: {error}") from error
