"""The audit log's source: events of the rest of the proxy."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import structlog

from leyline_engine.contract import Mode, Outcome, Receipt

from ..audit.chain import AuditKey
from ..audit.facts import TurnEdits, turn_edits
from ..audit.followup import Ask, FollowUps, is_closed
from ..audit.proofs import signed
from ..audit.records import (
    Record,
    Status,
    TurnFacts,
    claim_record,
    erasure_record,
    proof_record,
    quarantine_record,
    turn_record,
)
from ..audit.writer import AuditWriter, Job
from ..errors import AuditUnavailableError
from ..hub.audit import LostTurn, SharedTurns
from ..model.derived import Derived
from ..model.history import CONTINUES
from ..model.places import owed
from ..model.session import Session
from ..model.verdicts import Verdict
from ..telemetry.logging import frames_of
from ..turns.ports import TurnObserver
from ..turns.settled import SettledTurn
from ..turns.turn import Turn

log = structlog.get_logger("leyline.audit")

Turns = Literal["edited", "all"]

_PATIENCE_S = 5.0
"""Seconds to wait for the disk, and for Redis, when the proxy ends."""

_REFUSED = 256
"""Number of the newest refused turns remembered until they are abandoned."""

_TEXTS_PER_BODY = 2
"""Bytes of text (old and new) that a waiting record holds per byte of the request's body."""


class Auditor(TurnObserver):
    """Records turns, claims and forgets; without a writer, nothing. An observer of turns, and the
    log of the engines' actions apart from them.

    Args:
        turns: turns to record: those that edit or forget, or all.
        refuses: True to refuse what may have to be recorded while the log can't be written.
        watch: follows the log's state while the auditor is running.
        under_way: gets the turns whose records are lost if this process dies.
    """

    def __init__(
        self,
        writer: AuditWriter | None = None,
        key: AuditKey | None = None,
        turns: Turns = "edited",
        *,
        refuses: bool = False,
        watch: Callable[[], Coroutine[object, object, None]] | None = None,
        under_way: SharedTurns | None = None,
    ) -> None:
        self._writer = writer
        self._refuses = refuses
        self._watch = watch
        self._under_way = under_way
        self._announced: set[str] = set()
        """Messages whose records another process expects."""
        self._key = key
        self._all = turns == "all"
        self._followups = FollowUps(self._tell)
        self._refused: deque[str] = deque(maxlen=_REFUSED)

    @property
    def on(self) -> bool:
        """True if anything is recorded."""
        return self._writer is not None

    @property
    def problem(self) -> str | None:
        """The reason that records are lost now; None if the log is written, or off."""
        return self._writer.problem if self._writer is not None else None

    @property
    def closed(self) -> bool:
        """True while requests are refused."""
        return self._refuses and self.problem is not None

    def check(self) -> None:
        """Check that what a request changes can be recorded.

        Raises:
            AuditUnavailableError: it can't, and must be.
        """
        if self._refuses and (problem := self.problem) is not None:
            raise AuditUnavailableError(problem)

    def claim(self) -> None:
        """Lock the log's file, before the event loop runs.

        Raises:
            AuditError: this proxy may not write to the file.
        """
        if self._writer is not None:
            self._writer.claim()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold the log open, and write the waiting records on exit.

        Raises:
            AuditError: this proxy may not write to the file.
        """
        if self._writer is None:
            yield
            return
        await asyncio.to_thread(self._writer.start)
        watching = asyncio.create_task(self._watch()) if self._watch is not None else None
        try:
            yield
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.wait((watching,))
            await self._followups.aclose()
            await asyncio.to_thread(self._writer.close, _PATIENCE_S)

    def begun(self, turn: Turn) -> None:
        """Announce the record of a turn."""
        plan = turn.planned.plan
        edits = plan.planned is not Outcome.UNEDITED or plan.forgets or plan.unreachable
        if self._under_way is not None and (self._all or edits):
            self._announced.add(turn.message_id)
            place = turn.request.tenant.name, turn.identity.session_id
            self._under_way.begun(LostTurn(turn.message_id, *place, turn.name))

    def ended(self, turn: Turn) -> None:
        """Withdraw the record of a turn that needed none."""
        if self._under_way is not None and turn.message_id in self._announced:
            self._announced.discard(turn.message_id)
            self._under_way.ended(turn.message_id)

    def settled(self, settled: SettledTurn, session: Session) -> None:
        """Record a turn that was answered in full."""
        if self._writer is None:
            return
        turn, record = settled.turn, settled.record
        given = record.receipt if record is not None else None
        waiting = tuple(owed(session.places)) if turn.planned.plan.forgets else ()
        self._turn(
            turn, "settled", settled.model, receipt=given, told=settled.receipt, waiting=waiting
        )
        self._verdicts(turn, given, waiting)

    def refused(self, turn: Turn, receipt: Receipt, model: str) -> None:
        """Record a turn that the engine refused because of claims."""
        if self._writer is not None:
            self._refused.append(turn.message_id)
            self._turn(turn, "refused", model, receipt=receipt, told=receipt)

    def abandoned(self, turn: Turn, model: str) -> None:
        """Record a turn whose client has gone, or whose answer broke off.

        A refused turn is abandoned as well, and keeps its one record.
        """
        if self._writer is not None and turn.message_id not in self._refused:
            self._turn(turn, "abandoned", model, receipt=None, told=None)
            self._verdicts(turn, None, ())

    def carried(self, tenant: str, session: str, engine: str, result: str) -> None:
        """Record the result of a forget that was carried to another engine.

        Args:
            engine: model and run, as :attr:`UpstreamStatus.retains_as` names it.
            result: ``erased``, ``gone`` or ``pending``.
        """
        if self._writer is not None:
            self._tell(erasure_record(tenant, session, engine, result, time.time()))

    def quarantined(
        self,
        tenant: str,
        session: str,
        verdict: Verdict,
        *,
        reason: str,
        owed: Sequence[str],
        derived: Derived | None = None,
    ) -> None:
        """Record a message that was put into quarantine on demand."""
        if self._writer is not None:
            owner, at = (tenant, session), time.time()
            record = quarantine_record(
                owner, verdict, at, reason=reason, owed=owed, derived=derived
            )
            self._tell(record)

    def _verdicts(self, turn: Turn, receipt: Receipt | None, waiting: Sequence[str]) -> None:
        """Record the messages that a turn put into quarantine."""
        session = turn.identity.session
        known = {name for each in session.verdicts for name in each.spans} if session else set()
        owner = (turn.request.tenant.name, turn.identity.session_id)
        for verdict in turn.planned.verdicts:
            if verdict.span not in known:
                at = time.time()
                self._tell(quarantine_record(owner, verdict, at, receipt=receipt, owed=waiting))

    def proven(self, proof: Mapping[str, Any]) -> dict[str, Any]:
        """Record a forget with a proof, and return the proof with its signature.

        The signature is under the log's key; without one, there is none.
        """
        whole = signed(proof, self._key)
        self._tell(proof_record(whole, time.time()))
        return whole

    def held(self, owner: tuple[str, str], engine: str, receipt: Receipt, ask: Ask) -> None:
        """Record a forget that was carried to an engine whose running requests still hold some KV.

        Args:
            owner: tenant and session.
            receipt: of the request that carried it.
            ask: asks for its record, until nothing is held any more and that is recorded, too.
        """
        if self._writer is not None:
            self.carried(*owner, engine, "pending")
            self._followups.watch_erasure(owner, engine, receipt, ask)

    def claims(self, engine: str, events: Sequence[Mapping[str, Any]]) -> None:
        """Record events of one run of an engine."""
        for event in events if self._writer is not None else ():
            self._tell(claim_record(engine, event, time.time()))

    def position(self, engine: str) -> int | None:
        """Return the number of the newest event in the log for an engine's run; None for none."""
        return self._writer.position(engine) if self._writer is not None else None

    def _turn(
        self,
        turn: Turn,
        status: Status,
        model: str,
        *,
        receipt: Receipt | None,
        told: Receipt | None,
        waiting: tuple[str, ...] = (),
    ) -> None:
        try:
            facts = self._facts(turn, status, model, receipt=receipt, told=told, waiting=waiting)
        except Exception as error:  # a fault in here costs a record, never the request
            log.error("audit_record_failed", error=type(error).__name__, frames=frames_of(error))
            if self._writer is not None:
                self._writer.drop()
            return
        if facts is None:
            return
        weight = _TEXTS_PER_BODY * len(turn.request.raw) if facts.edits.edits else 0
        if self._offer(partial(self._record, facts), weight):
            self._announced.discard(turn.message_id)  # the record itself ends it
        told_to = turn.planned.plan.forgets and turn.enveloped
        if told_to and not is_closed(receipt):
            self._followups.watch(facts, turn.replica.client.record)

    def _facts(
        self,
        turn: Turn,
        status: Status,
        model: str,
        *,
        receipt: Receipt | None,
        told: Receipt | None,
        waiting: tuple[str, ...],
    ) -> TurnFacts | None:
        """Return the turn's facts for its record; None if it needs none."""
        planned, identity = turn.planned, turn.identity
        plan = planned.plan
        edits = turn_edits(plan, planned.prepared, planned.names, identity.session, _doubts(turn))
        if not (self._all or edits != TurnEdits() or _forgets(turn, receipt)):
            return None
        return TurnFacts(
            at=time.time(),
            status=status,
            tenant=turn.request.tenant.name,
            session=identity.session_id,
            turn=turn.name,
            index=turn.index,
            message_id=turn.message_id,
            model=model,
            engine=turn.status.retains_as,
            planned=plan.planned,
            receipt=receipt,
            told=told,
            edits=edits,
            forget=plan.forget,
            owed=waiting,
            unreachable=plan.unreachable,
            derived=planned.derived,
        )

    def _record(self, facts: TurnFacts) -> Record:
        """Return the record of a turn, in the writer's thread."""
        try:
            return turn_record(facts, self._key)
        except Exception:
            if self._under_way is not None:
                self._under_way.failed(facts.message_id)
            raise

    def _tell(self, record: Record) -> None:
        self._offer(lambda: record, 0)

    def _offer(self, job: Job, weight: int) -> bool:
        return self._writer is not None and self._writer.offer(job, weight)


def _doubts(turn: Turn) -> frozenset[Mode]:
    """Return the modes of edits for which it is unknown whether an engine had the text before."""
    began_here = not any(message.get("role") in CONTINUES for message in turn.request.messages)
    strange = turn.identity.session is None and (turn.unvouched or turn.untraced)
    if turn.unnamed or (strange and not began_here):
        return frozenset(Mode)
    # A forget then demands everything, and the receipt gives the result.
    return frozenset({Mode.FORGET} if turn.unvouched else ())


def _forgets(turn: Turn, receipt: Receipt | None) -> bool:
    plan = turn.planned.plan
    return plan.forgets or plan.unreachable or (receipt is not None and receipt.forgot is not None)
