"""Random sessions against one vLLM engine, with claims on their turns."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from claimant import Claimant, refusal
from oracle_models import OracleModel
from random_sessions import Driver, Running, Session
from secret_rows import draw_ordinary

from leyline_engine.contract import (
    ClaimKind,
    ClaimState,
    DemoteClaim,
    EditPayload,
    ProblemCode,
    ReleaseClaim,
)

CLAIMS = ("c0", "c1", "c2", "c3")
TENANTS = ("t0", "t1")


class ClaimingDriver(Driver):
    """The steps of :class:`Driver`, and commands to claims between them.

    After each step all that :meth:`Claimant.check` checks holds.
    """

    def __init__(self, seed: int, claimant: Claimant, subject: OracleModel) -> None:
        super().__init__(seed, claimant.engine, subject)
        self.claimant = claimant
        self.commands = random.Random(seed + 1)
        self.turns: dict[str, tuple[str, int]] = {}
        """By session, the name and the length of its last turn that has an answer."""
        self.taken = self.refused = self.retired = 0
        self.ends: set[ClaimState] = set()

    def step(self) -> None:
        """Maybe send a command, then let the engine work."""
        choice = self.commands.random()
        known = [each for each in self.sessions if each.name in self.turns]
        if choice < 0.08 and known:
            self._claim(self.commands.choice(known))
        elif choice < 0.09:
            self._command(ReleaseClaim)
        elif choice < 0.11:
            self._command(DemoteClaim)
        elif choice < 0.14:
            self.claimant.tick(self.commands.choice([100, 400, 900]))
        elif choice < 0.20 and len(self.running) < 3:
            self._press()
        self.claimant.check()
        super().step()
        self.claimant.check()

    def _press(self) -> None:
        """Somebody without an envelope needs most of the pool."""
        self._send(draw_ordinary(self.commands, self.commands.randint(560, 608)))

    def _claim(self, session: Session) -> None:
        """Claim a span of a session's last turn; a claim of this name gets a later revision."""
        turn, length = self.turns[session.name]
        start = self.commands.choice([0, 0, self.commands.randrange(length)])
        end = self.commands.choice([length, self.commands.randint(start + 1, length)])
        reply = self.claimant.try_claim(
            session.name,
            end,
            start=start,
            id=self.commands.choice(CLAIMS),
            tenant=session.scope,
            source=turn,
            kind=self.commands.choice([*ClaimKind, *[ClaimKind.HARD] * 3]),
            share=self.commands.choice([1.0, 1.0, 0.5, 0.1]),
            priority=self.commands.randrange(4),
            ttl_s=self.commands.choice([None, None, 1, 5]),
            write_no_admit=self.commands.random() < 0.1,
        )
        if reply.problem is not None:
            codes = {ProblemCode.INVALID_CLAIM, ProblemCode.CLAIM_LIMIT}
            assert reply.problem.code in codes, reply.problem
            return
        self.taken += reply.claims[0].state is ClaimState.MATERIALIZED
        self.ends.add(reply.claims[0].state)

    def _send(self, prompt: tuple[int, ...], payload: EditPayload | None = None) -> Running:
        if payload is not None and self.commands.random() < 0.3:
            # The driver names a session's turns t1, t2, ….
            gone = tuple(f"t{at}" for at in range(1, int(payload.turn[1:])))
            payload = msgspec.structs.replace(payload, retire=gone)
            self.retired += bool(gone)
        return super()._send(prompt, payload)

    def _command(self, command: type[ReleaseClaim] | type[DemoteClaim]) -> None:
        reply = self.claimant.send(
            command(self.commands.choice(TENANTS), self.commands.choice(CLAIMS))
        )
        if reply.problem is None:
            self.ends.add(reply.claims[0].state)
        else:
            assert reply.problem.code in {ProblemCode.UNKNOWN_CLAIM, ProblemCode.NOT_LOCKED}

    def collect(self, mine: Running, output: Any) -> None:
        """Go on from an answer; a refused request names the claims in its way."""
        answer = self.engine._answer(mine.name, output)
        if not answer.error:
            super().collect(mine, output)
            if mine.session in self.sessions and mine.session.last is not None:
                self.turns[mine.session.name] = mine.session.turn, len(answer.tokens) - 1
                if self.commands.random() < 0.4:
                    self._claim(mine.session)
            return
        self.refused += 1
        if mine.payload is not None:
            found = refusal(answer)
            assert found.own or found.others
            assert not set(found.own) - set(CLAIMS)
        if mine.session is not None:
            self._restart(mine.session)
