"""The engine's thread: admits, steps and ends requests, one forward at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from leyline_engine.contract import (
    ClaimCommand,
    ClaimProblem,
    ClaimReply,
    LedgerAnswer,
    LedgerQuestion,
    ProblemCode,
    Receipt,
    TurnRecord,
)
from leyline_engine.records.turn_records import RecordBook
from leyline_replay.claim_desk import ClaimDesk, outgrown_record, refused_record
from leyline_replay.engine import (
    PoolExhaustedError,
    PromptTooLongError,
    RefusedByClaimError,
    ReplayEngine,
)
from leyline_replay.fair_queue import ScopedQueues
from leyline_replay.generation import (
    Channel,
    ErrorEvent,
    FinishEvent,
    FinishReason,
    GeneratedAnswer,
    Job,
    JobSpec,
    RunningJob,
    TextEvent,
)
from leyline_replay.metrics import Filing, Readings
from leyline_replay.sequence import Sequence

log = logging.getLogger(__name__)

_Reply = TypeVar("_Reply")


class EngineOverloadedError(Exception):
    """The waiting queue is full; the caller may try again later."""


class EngineStoppedError(Exception):
    """The engine is shutting down, or has failed and serves nothing more."""


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits of how much runs and waits at once."""

    max_running: int = 8
    max_waiting: int = 64


class EngineService:
    """Runs requests on its own thread; the asyncio side submits and reads events.

    Scopes take turns, one step (a prefill chunk or a decoded token) each; within a scope its
    requests do. A request whose scope has the fewest running ones is admitted first. Commands
    about claims wait for one round at most.

    Args:
        desk: desk of the engine's claims; without one it takes none.
    """

    def __init__(
        self,
        engine: ReplayEngine,
        decode: Callable[[list[int]], str],
        *,
        limits: ServiceLimits | None = None,
        records: RecordBook | None = None,
        desk: ClaimDesk | None = None,
    ) -> None:
        self.capability = engine.capability
        self.max_context = engine.max_context
        self.records = records or RecordBook(instance=engine.capability.instance)
        self._filing = Filing(self.records, engine.metrics)
        self._readings = Readings(engine.read_levels if engine.metrics.collects else None)
        self._engine = engine
        self._decode = decode
        self._desk = desk
        self._limits = limits or ServiceLimits()
        self._wake = threading.Condition()
        self._waiting: ScopedQueues[Job] = ScopedQueues()
        """Waiting jobs; guarded by ``_wake``, like the two flags below."""
        self._closing = False
        self._failure: str | None = None
        self._deadline = float("inf")
        self._running: ScopedQueues[RunningJob] = ScopedQueues()
        """Running jobs; the engine thread's own."""
        self._idle_checked = True
        self._thread = threading.Thread(target=self._main, name="leyline-engine", daemon=True)
        self._thread.start()

    # The asyncio side

    def submit(self, spec: JobSpec) -> Job:
        """Queue a request; its events arrive on the job's channel. Call on a running loop.

        Raises:
            EngineOverloadedError: too many requests wait already.
            EngineStoppedError: the engine takes no more requests.
        """
        job = Job(spec, Channel(asyncio.get_running_loop()))
        with self._wake:
            self._check_open()
            if len(self._waiting) >= self._limits.max_waiting:
                raise EngineOverloadedError(
                    f"{self._limits.max_waiting} requests are waiting already"
                )
            self._waiting.push(spec.scope, job)
            self._wake.notify()
        return job

    async def claims(self, command: ClaimCommand) -> ClaimReply:
        """Carry out a command about claims, between two rounds. Call on a running loop.

        Raises:
            EngineStoppedError: the engine carries out no more commands.
        """
        reply = await self._beside(lambda desk: desk.ask(command))
        problem = ClaimProblem(ProblemCode.UNSUPPORTED, "this engine takes no claims")
        return reply or ClaimReply(problem=problem)

    async def flush(self) -> bool:
        """Empty the cache, between two rounds; returns False if a request runs.

        Call on a running loop; raises as :meth:`claims`.
        """
        return await self._beside(lambda desk: desk.ask_to_flush()) or False

    async def ledger(self, question: LedgerQuestion) -> LedgerAnswer | None:
        """Return what the ledger has of a session; None without a desk. Called and raises as
        :meth:`claims`."""
        return await self._beside(lambda desk: desk.ask_ledger(question))

    async def _beside(self, ask: Callable[[ClaimDesk], asyncio.Future[_Reply]]) -> _Reply | None:
        """Return the answer to what is asked between two rounds; None without a desk."""
        if self._desk is None:
            return None
        with self._wake:
            self._check_open()
            reply = ask(self._desk)
            self._wake.notify()
        return await reply

    def _check_open(self) -> None:
        if self._closing or self._failure is not None:
            raise EngineStoppedError(self._failure or "the engine is shutting down")

    def cancel(self, job: Job) -> None:
        """Give a request up; its channel ends soon. Harmless if it has ended already."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()

    @property
    def failure(self) -> str | None:
        """Reason why the engine serves nothing more; None while it is well."""
        return self._failure

    def close(self, grace: float = 5.0) -> None:
        """Stop: refuse waiting requests, and give running ones ``grace`` seconds to end."""
        with self._wake:
            self._closing = True
            self._deadline = time.monotonic() + grace
            self._refuse_waiting()
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=grace + 30)

    # The engine's thread

    def _main(self) -> None:
        try:
            self._readings.fell_idle()
            while self._wait_for_work():
                self._heed_claims()
                self._admit_waiting()
                self._round()
                # The receipts of earlier forgets learn what has been overwritten since.
                forgets = self._engine.settled_forgets()
                self._filing.progressed(forgets, self._engine.settled_proofs(forgets))
                self._readings.stepped()
        except Exception as error:
            log.exception("the engine failed and serves nothing more")
            with self._wake:
                self._failure = f"the engine failed ({type(error).__name__})"
        self._abandon_all()

    def _wait_for_work(self) -> bool:
        """Block until there is work; returns False when it is time to end."""
        with self._wake:
            idle = not (self._running or self._waiting)
        if idle and not self._idle_checked:
            # Outside the lock: a submission needn't wait for it.
            self._engine.check_integrity()
            self._readings.fell_idle()
            self._idle_checked = True
        with self._wake:
            while not (self._running or self._waiting or self._closing):
                due = None if self._desk is None else self._desk.seconds_left()
                if due == 0:
                    break
                # A clock may count in larger steps than the wait.
                self._wake.wait(None if due is None else due + 0.001)
            if self._running or self._waiting:
                self._idle_checked = False
            if not self._closing:
                return True
            return bool(self._running) and time.monotonic() < self._deadline

    def _heed_claims(self) -> None:
        """Carry out commands about claims, and refuse at once requests that would wait for one."""
        desk = self._desk
        if desk is None:
            return
        if desk.attend():
            self._idle_checked = False
        with self._wake:
            waiting = list(self._waiting)
        for job in waiting:
            error = desk.refused(job)
            if error is not None and self._withdraw(job):
                self._refuse(job, error)

    def _withdraw(self, job: Job) -> bool:
        """Take a job out of the queue; returns False if it has been taken out already."""
        with self._wake:
            if job not in self._waiting:
                return False
            self._waiting.remove(job.spec.scope, job)
            return True

    def _refuse(self, job: Job, error: RefusedByClaimError) -> None:
        self._filing.refused(job.spec, refused_record(job.spec.request, error))
        job.channel.put(ErrorEvent(error))

    def _candidates(self) -> list[Job]:
        """Return waiting jobs to try next, the scope with the fewest running requests first."""
        with self._wake:
            for job in [job for job in self._waiting if job.cancelled]:
                self._waiting.remove(job.spec.scope, job)
                job.channel.put(_cancelled(job.spec))
            heads = [] if self._closing else self._waiting.heads()
        return [job for _, job in sorted(heads, key=lambda head: self._running.count(head[0]))]

    def _admit_waiting(self) -> None:
        candidates = self._candidates()
        while candidates and len(self._running) < self._limits.max_running:
            if not any(self._take(job) for job in candidates):
                return
            candidates = self._candidates()

    def _take(self, job: Job) -> bool:
        """Take a job out of the queue and start it; it goes back when there is no room yet."""
        if not self._withdraw(job):
            return False
        if self._admit(job):
            return True
        with self._wake:
            self._waiting.push_front(job.spec.scope, job)
        return False

    def _admit(self, job: Job) -> bool:
        """Try to start a job; returns True when it no longer waits, for better or worse."""
        try:
            sequence = self._engine.admit(job.spec.request)
        except PoolExhaustedError as error:
            if self._running:
                return False
            job.channel.put(ErrorEvent(error))
        except RefusedByClaimError as error:
            self._refuse(job, error)
        except PromptTooLongError as error:
            job.channel.put(ErrorEvent(error))
        except Exception as error:
            log.exception("request %s failed at admission", job.spec.request.request_id)
            job.channel.put(ErrorEvent(error))
        else:
            running = RunningJob(job, sequence, GeneratedAnswer(job.spec, self._decode))
            self._running.push(job.spec.scope, running)
            self._filing.began(job.spec, TurnRecord(receipt=sequence.receipt))
        return True

    def _round(self) -> None:
        """Run one step for one request of each scope."""
        progress = False
        for scope, _ in self._running.heads():
            for _ in range(self._running.count(scope)):
                if self._step(self._running.take_turn(scope)):
                    progress = True
                    break
        if not progress and self._running:
            # Every request wants a slot and none is left: one answer ends here for the others.
            victim = list(self._running)[-1]
            if not self._outgrew(victim):
                self._send(victim, victim.answer.cut_short())
                self._finish(victim)

    def _outgrew(self, running: RunningJob) -> bool:
        """End an answer with an error if claims hold the slots that it wants."""
        desk = self._desk
        error = None if desk is None else desk.outgrown(running.job, running.sequence)
        if error is None:
            return False
        record = outgrown_record(self._end(running).abort(), error)
        self._filing.refused(running.job.spec, record, began=True)
        running.job.channel.put(ErrorEvent(error))
        return True

    def _step(self, running: RunningJob) -> bool:
        """Run one step; returns False if the request can't continue for lack of a slot."""
        if running.job.cancelled or running.job.channel.abandoned:
            record = self._filing.ended(running.job.spec, self._end(running).abort())
            running.job.channel.put(
                FinishEvent(FinishReason.CANCELLED, record, running.answer.sampled)
            )
            return True
        try:
            logits = running.forward()
            if logits is None:
                return True
            self._send(running, running.answer.advance(logits))
        except PoolExhaustedError:
            return False
        except Exception as error:
            log.exception("request %s failed", running.job.spec.request.request_id)
            self._filing.ended(running.job.spec, self._end(running).abort())
            running.job.channel.put(ErrorEvent(error))
            return True
        if running.answer.finish is not None:
            self._finish(running)
        return True

    def _send(self, running: RunningJob, event: TextEvent | None) -> None:
        if event is not None:
            running.job.channel.put(event)

    def _finish(self, running: RunningJob) -> None:
        answer, sequence = running.answer, self._end(running)
        try:
            record = self._filing.ended(running.job.spec, sequence.finish(answer.last_token))
        except Exception as error:
            log.exception("request %s failed at its end", running.job.spec.request.request_id)
            self._filing.ended(running.job.spec, sequence.abort())
            running.job.channel.put(ErrorEvent(error))
            return
        reason = answer.finish or FinishReason.STOP
        running.job.channel.put(FinishEvent(reason, record, answer.sampled))

    def _end(self, running: RunningJob) -> Sequence:
        self._running.remove(running.job.spec.scope, running)
        return running.sequence

    def _abandon_all(self) -> None:
        """End all remaining jobs, so that no reader waits forever."""
        error = EngineStoppedError(self._failure or "the engine is shutting down")
        for running in list(self._running):
            try:
                self._end(running).abort()
            except Exception:
                log.exception("a request could not be ended cleanly")
            running.job.channel.put(ErrorEvent(error))
        with self._wake:
            # From here on nothing is queued any more: submit() refuses.
            self._closing = True
            self._refuse_waiting()
            if self._desk is not None:
                self._desk.close(error)

    def _refuse_waiting(self) -> None:
        error = EngineStoppedError(self._failure or "the engine is shutting down")
        for job in list(self._waiting):
            self._waiting.remove(job.spec.scope, job)
            job.channel.put(ErrorEvent(error))


def _cancelled(spec: JobSpec) -> FinishEvent:
    receipt = Receipt(message_id=spec.request.request_id)
    return FinishEvent(FinishReason.CANCELLED, TurnRecord(receipt=receipt, finished=True), 0)
