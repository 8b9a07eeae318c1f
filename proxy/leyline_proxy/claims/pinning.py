"""Pinned messages: claims on their KV, made and renewed alongside the requests.

A retained turn names its pinned messages. The resulting commands run in a separate task, one per
session at a time, and the newest turn wins. Refused pins are reported with the session's next turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from leyline_engine.contract import GetClaim, ProblemCode, ReleaseClaim, SubmitClaim

from ..errors import ProxyError
from ..model.session import Session
from ..request.annotations import Pin, pin_terms
from ..telemetry.logging import frames_of
from ..turns.ports import TurnObserver
from ..turns.settled import SettledTurn
from ..turns.turn import Turn
from .engine import ClaimEngine
from .pins import MAX_PINS, HeldPin, WantedPin, pin_key, wanted_pins
from .service import ClaimService

log = structlog.get_logger("leyline.claims")

RETRY_S = 60.0
"""Seconds until a refused pin is tried again, unless its message changes."""

_MAX_RUNNING = 16
_MAX_SESSIONS = 2048
"""Number of sessions whose pins are remembered; the claims of others expire."""

_Owner = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The pins of a turn, and the replica with its KV."""

    replica: str
    pins: Mapping[str, WantedPin]


@dataclass(frozen=True, slots=True)
class _Refused:
    """A pin that the engine didn't accept, or that ended at once."""

    held: HeldPin
    reason: str


@dataclass(slots=True)
class _Pins:
    """One session's pins by claim id."""

    replica: str
    """The replica that holds them."""
    held: dict[str, HeldPin] = field(default_factory=dict)
    refused: dict[str, _Refused] = field(default_factory=dict)


class Pinning(TurnObserver):
    """Keeps a session's claims in line with its pinned messages."""

    def __init__(self, claims: ClaimService, clock: Callable[[], float] = time.monotonic) -> None:
        self._claims = claims
        self._clock = clock
        self._sessions: OrderedDict[_Owner, _Pins] = OrderedDict()
        self._running: dict[_Owner, asyncio.Task[None]] = {}
        self._next: dict[_Owner, _Wanted] = {}

    def settled(self, settled: SettledTurn, session: Session) -> None:
        """Start to claim the turn's pinned messages, without waiting."""
        turn, retained = settled.turn, settled.source
        if retained is None or not turn.enveloped or not turn.status.takes_claims:
            return
        owner = (turn.request.tenant.name, turn.identity.session_id)
        pins = wanted_pins(retained, _pins_of(turn), owner[1])
        wanted = _Wanted(turn.replica.name, pins)
        if not pins and owner not in self._sessions and owner not in self._running:
            return
        if owner in self._running:
            self._next[owner] = wanted
        elif len(self._running) < _MAX_RUNNING:  # otherwise the next turn asks again
            self._running[owner] = asyncio.create_task(self._run(owner, wanted))

    def refusals(self, turn: Turn) -> list[dict[str, Any]]:
        """Return a turn's pinned messages known to be refused, for the caller."""
        names, owner = turn.planned.names, (turn.request.tenant.name, turn.identity.session_id)
        if names is None or not turn.status.takes_claims:
            return []
        held = self._sessions.get(owner)
        refused = held.refused if held is not None else {}
        told: list[dict[str, Any]] = []
        for number, index in enumerate(_pins_of(turn)):
            known = refused.get(pin_key(owner[1], names.client[index].id))
            reason = known.reason if known is not None else ""
            if number >= MAX_PINS:
                reason = f"more than {MAX_PINS} messages of a session are pinned"
            if reason:
                told.append({"message": index, "verb": "pin", "reason": reason})
        return told

    async def aclose(self) -> None:
        """Cancel running work; claims expire."""
        self._next.clear()
        for task in tuple(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run(self, owner: _Owner, wanted: _Wanted | None) -> None:
        try:
            while wanted is not None:
                await self._follow(owner, wanted)
                wanted = self._next.pop(owner, None)
        except ProxyError as error:  # the next turn asks again
            log.info("pin_failed", tenant=owner[0], error=error.code)
        except Exception as error:  # no caller waits for it
            log.error("pin_failed", error=type(error).__name__, frames=frames_of(error))
        finally:
            self._running.pop(owner, None)
            self._next.pop(owner, None)

    async def _follow(self, owner: _Owner, wanted: _Wanted) -> None:
        """Release messages that are no longer pinned, and claim the pinned ones."""
        pins = self._sessions.setdefault(owner, _Pins(wanted.replica))
        self._sessions.move_to_end(owner)
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        if pins.replica != wanted.replica:
            await self._leave(owner, pins, wanted.replica)
        engine = self._claims.at(pins.replica)
        for key in [key for key in pins.held if key not in wanted.pins]:
            await engine.send(ReleaseClaim(owner[0], key))
            del pins.held[key]
        pins.refused = {key: why for key, why in pins.refused.items() if key in wanted.pins}
        for key, pin in wanted.pins.items():
            if self._is_due(engine, owner[0], key, pin, pins):
                await self._claim(engine, owner, key, pin, pins)
        if not pins.held and not pins.refused:
            self._sessions.pop(owner, None)

    async def _leave(self, owner: _Owner, pins: _Pins, replica: str) -> None:
        """Release the claims on an engine that the session has left; they would hold unused KV."""
        engine, held = self._claims.at(pins.replica), tuple(pins.held)
        pins.replica = replica
        pins.held.clear()
        pins.refused.clear()
        try:
            for key in held:
                await engine.send(ReleaseClaim(owner[0], key))
        except ProxyError as error:  # it is probably down; claims expire
            log.info("pin_not_released", tenant=owner[0], upstream=engine.name, error=error.code)

    def _is_due(
        self, engine: ClaimEngine, tenant: str, key: str, pin: WantedPin, pins: _Pins
    ) -> bool:
        now = self._clock()
        if refused := pins.refused.get(key):
            held = refused.held
            return held.is_due(pin, now) or now - held.sent_at >= RETRY_S
        known = pins.held.get(key)
        if known is None or known.is_due(pin, now):
            return True
        return not engine.lives(tenant, key)  # it was dropped meanwhile

    async def _claim(
        self, engine: ClaimEngine, owner: _Owner, key: str, pin: WantedPin, pins: _Pins
    ) -> None:
        tenant, session = owner
        known = pins.held.get(key)
        revision = known.revision + 1 if known is not None else 1
        reply = await engine.send(SubmitClaim(pin.claim(key, tenant, session, revision)))
        if reply.problem is not None and reply.problem.code is ProblemCode.STALE_REVISION:
            # Another proxy, or this one before a restart, knew the message by this name.
            there = await engine.send(GetClaim(tenant, key))
            revision = max((s.claim.revision for s in there.claims), default=revision) + 1
            reply = await engine.send(SubmitClaim(pin.claim(key, tenant, session, revision)))
        held = HeldPin(pin, revision, self._clock())
        status = reply.claims[0] if reply.claims else None
        if reply.problem is not None:
            problem = reply.problem
            reason = f"{problem.code.value}: {problem.message}"
        elif status is not None and not status.state.lives:
            reason = ": ".join(filter(None, (status.state.value, status.cause)))
        else:
            pins.refused.pop(key, None)
            pins.held[key] = held
            return
        # An earlier accepted revision remains, and must be released later.
        pins.refused[key] = _Refused(held, reason)


def _pins_of(turn: Turn) -> dict[int, Pin]:
    """Return the terms of the pinned messages, by index in the client's list."""
    said = turn.planned.prepared.pins.items()
    return {index: terms for index, each in said if (terms := pin_terms(each)) is not None}
