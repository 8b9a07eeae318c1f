"""Claims beside the engine's thread: commands to it, its clock, and requests that wait in vain;
questions about its ledger come the same way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from leyline_engine.contract import (
    ClaimCommand,
    ClaimReply,
    DemoteClaim,
    LedgerAnswer,
    LedgerQuestion,
    Receipt,
    ReleaseClaim,
    SubmitClaim,
    TokenCounts,
    TurnRecord,
)
from leyline_replay.engine import GenerationRequest, PromptTooLongError, ReplayEngine
from leyline_replay.engine_claims import RefusedByClaimError, as_refused
from leyline_replay.generation import Job
from leyline_replay.sequence import Sequence

log = logging.getLogger(__name__)

_EVERY_MS = 1000
"""Maximum age of the book's time while a claim has a deadline and requests come, in ms."""


_Reply = ClaimReply | LedgerAnswer | bool


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    run: Callable[[], _Reply]
    changes: bool
    """True if it may change what waiting requests find."""
    reply: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop

    def settle(self, answer: _Reply | Exception) -> None:
        """Answer on the asker's loop, if it is still there and still waits for the answer."""
        try:
            self.loop.call_soon_threadsafe(self._settle, answer)
        except RuntimeError:
            log.debug("whoever asked about a claim is gone")

    def _settle(self, answer: _Reply | Exception) -> None:
        if self.reply.done():
            return
        if isinstance(answer, Exception):
            self.reply.set_exception(answer)
        else:
            self.reply.set_result(answer)


class ClaimDesk:
    """The claims of one engine, for its service.

    Args:
        now_ns: a clock that never goes back; the engine itself has none.
    """

    def __init__(
        self, engine: ReplayEngine, *, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._engine = engine
        self._claims = engine.claims
        self._now_ns = now_ns
        self._began_ns = now_ns()
        self._order = 0
        self._asked: deque[_Asked] = deque()

    def ask(self, command: ClaimCommand) -> asyncio.Future[ClaimReply]:
        """Queue a command. Called on a running loop."""
        changes = isinstance(command, SubmitClaim | ReleaseClaim | DemoteClaim)
        return self._queue(partial(self._claims.keeper.carry_out, command), changes=changes)

    def ask_ledger(self, question: LedgerQuestion) -> asyncio.Future[LedgerAnswer]:
        """Queue a question about the engine's ledger. Called on a running loop."""
        return self._queue(partial(self._engine.read_ledger, question), changes=False)

    def ask_to_flush(self) -> asyncio.Future[bool]:
        """Queue a flush of the cache; its reply is False if a request runs.

        Called on a running loop.
        """
        return self._queue(self._flush, changes=True)

    def _queue(self, run: Callable[[], _Reply], *, changes: bool) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        asked = _Asked(run, changes, loop.create_future(), loop)
        self._asked.append(asked)
        return asked.reply

    # The engine's thread

    def seconds_left(self) -> float | None:
        """Return the time until there is work: 0 if there is now, None if none is foreseen."""
        if self._asked:
            return 0.0
        deadline = self._claims.keeper.book.next_deadline_ms
        return None if deadline is None else max(0.0, (deadline - self._now_ms()) / 1000)

    def attend(self) -> bool:
        """Carry out commands, and let claims expire; returns True if anything may have changed."""
        changed = self._pass_time()
        while self._asked:
            asked = self._asked.popleft()
            changed |= asked.changes
            try:
                self._tick()
                asked.settle(asked.run())
            except Exception as error:
                log.exception("a command failed")
                asked.settle(error)
        return changed

    def close(self, error: Exception) -> None:
        """Refuse all commands from now on."""
        while self._asked:
            self._asked.popleft().settle(error)

    def refused(self, job: Job) -> RefusedByClaimError | None:
        """Return why a waiting job would wait for a claim; checked again when claims lock more."""
        locks = self._claims.shelf.locks_taken
        if job.cleared == locks:
            return None
        job.cleared = locks
        try:
            request = self._engine.examine(job.spec.request)
        except RefusedByClaimError as error:
            return error
        except PromptTooLongError:
            return None  # its admission will report it
        except Exception:
            log.exception("request %s could not be examined", job.spec.request.request_id)
            return None  # its admission will fail as well, and answer
        if request is not job.spec.request:
            job.spec = replace(job.spec, request=request)
        return None

    def outgrown(self, job: Job, sequence: Sequence) -> RefusedByClaimError | None:
        """Return why a running job found no slot; None if no claim holds any."""
        return self._engine.outgrown(job.spec.request, sequence)

    def _flush(self) -> bool:
        if self._engine.busy:
            return False
        self._engine.flush()
        return True

    def _now_ms(self) -> int:
        return (self._now_ns() - self._began_ns) // 1_000_000

    def _tick(self) -> None:
        self._order += 1
        self._claims.keeper.tick(self._order, self._now_ms())

    def _pass_time(self) -> bool:
        book = self._claims.keeper.book
        deadline, now = book.next_deadline_ms, self._now_ms()
        if deadline is None or (now < deadline and now < book.now_ms + _EVERY_MS):
            return False
        self._tick()
        return now >= deadline


def refused_record(request: GenerationRequest, error: RefusedByClaimError) -> TurnRecord:
    """Return the record of a request that never ran."""
    payload = request.payload
    receipt = Receipt(
        message_id=request.request_id,
        session=payload.session if payload else "",
        tokens=TokenCounts(prompt=len(request.tokens)),
        skipped_actions=request.skipped,
    )
    return TurnRecord(receipt=as_refused(receipt, error), finished=True)


def outgrown_record(record: TurnRecord, error: RefusedByClaimError) -> TurnRecord:
    """Return the record of a request that could not continue."""
    return msgspec.structs.replace(record, receipt=as_refused(record.receipt, error))
