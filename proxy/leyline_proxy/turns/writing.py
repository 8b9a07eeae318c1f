"""Texts that policies want a model to write: requested from the engine alongside the requests, and
used on later turns.

A question contains the conversation, so the engine's KV of it belongs to the session: it is sent
under the session's name and counted as KV without a name here, which a forget then reaches. If the
engine can't be informed of the owner, its KV of the conversation is out of reach.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import msgspec
import structlog

from leyline_engine.contract import edit_envelope, sign_envelope
from leyline_policies.context import Completion

from ..model.places import after_turn
from ..model.session import Session
from ..plan.outgoing import edit_payload
from ..plan.planning import sink_of
from ..plan.synthesis import TurnPlan
from ..sessions import SessionStore
from ..settings.cache_scope import MEMBER
from ..telemetry.metrics import Metrics
from .erasure import Erasures
from .turn import Turn

log = structlog.get_logger("leyline.policies")

LONGEST_ANSWER = 32 * 1024
"""Largest number of characters; longer answers are cut."""

_MAX_RUNNING = 4
_MAX_KEPT = 8
"""Largest number of a session's answers."""
_MAX_FAILURES = 3
"""Number of failures after which a question isn't asked again."""
_MAX_REMEMBERED = 1_024

_Question = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class _Text:
    """A text for a policy."""

    name: str
    """Its name, and that of its question at the engine."""
    turn: str
    """Name of the turn whose policy asked."""
    key: str
    answer: str | None
    """None if the model gave none."""


class Writing:
    """Asks questions, a few at a time, and one per session at a time."""

    def __init__(
        self,
        store: SessionStore,
        metrics: Metrics,
        *,
        hints_secret: str | None,
        erasures: Erasures,
    ) -> None:
        self._store = store
        self._erasures = erasures
        self._metrics = metrics
        self._hints_secret = hints_secret
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._failures: Counter[_Question] = Counter()

    def start(self, turn: Turn) -> None:
        """Ask the first of the turn's questions that isn't being answered."""
        owner = (turn.request.tenant.name, turn.identity.session_id)
        if owner in self._running or len(self._running) >= _MAX_RUNNING:
            return
        for wanted in turn.planned.prepared.wanted:
            if self._failures[(*owner, wanted.key)] < _MAX_FAILURES:
                self._running[owner] = asyncio.create_task(self._write(owner, turn, wanted))
                return

    async def aclose(self) -> None:
        """Cancel the unanswered questions."""
        for task in tuple(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _write(self, owner: tuple[str, str], turn: Turn, wanted: Completion) -> None:
        question = (*owner, wanted.key)
        try:
            written = await self._answer(owner, turn, wanted)
        except Exception as error:  # no caller waits for it; the next turn asks again
            written = False
            log.warning("policy_question_failed", tenant=owner[0], error=type(error).__name__)
        finally:
            self._running.pop(owner, None)
        self._metrics.policy_completions.labels("written" if written else "failed").inc()
        if written:
            self._failures.pop(question, None)
            return
        if len(self._failures) >= _MAX_REMEMBERED:
            self._failures.clear()
        self._failures[question] += 1

    async def _answer(self, owner: tuple[str, str], turn: Turn, wanted: Completion) -> bool:
        # Record it before the engine sees it: a forget must know of it in any case.
        name = f"w-{uuid4().hex[:12]}"
        body, run = self._body(turn, wanted, name), turn.status.retains_as
        told = "custom_params" in body
        asking = await self._store.update(
            *owner, lambda session: _asking(_known(session), run, told=told)
        )
        answer: str | None = None
        try:
            answer = await turn.replica.client.complete(body)
        finally:
            kept = answer[:LONGEST_ANSWER] if answer is not None else None
            session = await self._store.update(
                *owner,
                lambda now: _asked(
                    _known(now),
                    asking,
                    (run, turn.replica.name),
                    text=_Text(name, turn.name, wanted.key, kept),
                ),
            )
            self._erasures.start(session)
        return answer is not None

    def _body(self, turn: Turn, wanted: Completion, name: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": wanted.model or turn.request.model,
            "messages": list(wanted.messages),
            "max_tokens": wanted.max_tokens,
            "temperature": 0,
        }
        if turn.request.tenant.cache_salt is not None:
            body[MEMBER] = turn.request.tenant.cache_salt
        capability = turn.status.capability
        if capability is None or body["model"] != capability.model:
            return body
        payload = edit_payload(
            turn.request,
            turn.identity.session_id,
            name,
            TurnPlan(),
            sink_of(turn.status),
            secret=self._hints_secret,
        )
        envelope = edit_envelope(f"m-{uuid4().hex}", payload)
        if self._hints_secret is not None:
            envelope = sign_envelope(envelope, self._hints_secret)
        return {**body, "custom_params": {"kv_hints": msgspec.to_builtins(envelope)}}


class SessionGoneError(Exception):
    """The session that a text is written for has expired meanwhile."""


class SessionMovedError(Exception):
    """The engine has forgotten the session since the turn, or is about to."""


def _asking(session: Session, run: str, *, told: bool) -> Session:
    """Return the session before a run of an engine receives a question.

    Args:
        told: True if the engine is informed of the question's owner.

    Raises:
        SessionMovedError: a forget may already have passed, and the question would come after it.
    """
    place = session.places.get(run)
    if run and (place is None or place.owed):
        raise SessionMovedError
    if not told:
        retained = session.turns[-1].index + 1 if session.turns else 0
        # The next turn gives new names to messages of a turn that isn't retained.
        before = session.next_index + (retained < session.next_index)
        session = replace(session, untraced=max(session.untraced, before))
    return session.lose_turn()


def _asked(session: Session, asking: Session, place: tuple[str, str], *, text: _Text) -> Session:
    """Return the session after a question.

    Demands made meanwhile came too early for KV that the question left in the cache, and may
    concern the answer's content.

    Args:
        asking: the session when the question was asked.
        place: the run that was asked, and its replica.
        text: the answer.
    """
    # A concurrent forget must learn that a request ended meanwhile.
    session, demands = session.lose_turn(), session.demands
    if demands == asking.demands:
        return _with_text(session, text)
    owing = after_turn(session.places, *place, demanded=False, owes=True)
    return replace(session, places=owing)


def _known(session: Session | None) -> Session:
    if session is None:
        raise SessionGoneError
    return session


def _with_text(session: Session, text: _Text) -> Session:
    if text.answer is None:
        return session
    kept: Mapping[str, str] = {**session.completions, text.key: text.answer}
    return replace(
        session,
        completions=dict(list(kept.items())[-_MAX_KEPT:]),
        readings=session.readings.written(text.name, text.turn, text.key),
    )
