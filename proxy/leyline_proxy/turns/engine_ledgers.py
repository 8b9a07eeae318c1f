"""The engines' own ledgers, as far as they concern a session."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from leyline_engine.contract import LEDGER_PATH, LedgerAnswer, LedgerQuestion

from ..errors import ProxyError
from ..model.places import is_unknown_run
from ..model.session import Session
from ..upstream.pool import ReplicaPool
from ..upstream.replica import Replica

Silence = Literal["unreachable", "unsupported", "gone"]


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """One engine's answer."""

    engine: str
    """The replica's name."""
    owed: bool
    """True if it hasn't confirmed a forget of the session yet."""
    answer: LedgerAnswer | Silence
    """Its ledger's content, or the reason why that isn't known."""


class EngineLedgers:
    """Asks the engines that had a session.

    Args:
        hints_secret: signs the questions; None leaves them unsigned.
    """

    def __init__(self, pool: ReplicaPool, *, hints_secret: str | None) -> None:
        self._pool = pool
        self._hints_secret = hints_secret

    async def ask(self, session: Session, spans: Sequence[str]) -> list[EngineAnswer]:
        """Return the answers of all engines that may hold KV of a session, in order of their runs.

        Args:
            spans: names of messages.
        """
        asked = LedgerQuestion(scope=session.tenant, session=session.id, spans=tuple(spans))
        body = msgspec.json.encode(asked)
        places = session.places.items()
        answers = await asyncio.gather(
            *(self._answer(run, place.replica, body) for run, place in places)
        )
        return [
            EngineAnswer(place.replica, place.owed, answer)
            for (_, place), answer in zip(places, answers, strict=True)
        ]

    async def _answer(self, run: str, name: str, body: bytes) -> LedgerAnswer | Silence:
        # By run first: the replica may have another name now.
        replica = self._pool.holding(run)
        if replica is None:
            found = self._pool.get(name)
            up = found is not None and found.status.up and not is_unknown_run(run)
            return "gone" if up else "unreachable"
        return await self._ask(replica, body)

    async def _ask(self, replica: Replica, body: bytes) -> LedgerAnswer | Silence:
        try:
            response = await replica.client.answer_to_claims(
                body, self._hints_secret, path=LEDGER_PATH
            )
        except ProxyError:
            return "unreachable"
        if response.status_code in (404, 405):
            return "unsupported"
        try:
            if response.status_code == 200:
                return msgspec.json.decode(response.content, type=LedgerAnswer)
        except msgspec.DecodeError:
            pass
        return "unreachable"


def with_engines(document: Mapping[str, Any], answers: Sequence[EngineAnswer]) -> dict[str, Any]:
    """Return a session's ledger with the engines' answers.

    Args:
        document: of :func:`~leyline_proxy.sessions.ledger.session_ledger`.
    """
    known = [(each.engine, each.answer) for each in answers]
    return {
        **document,
        "spans": [
            {**span, "engines": [_readers(*each, span["span"]) for each in known]}
            for span in document["spans"]
        ],
        "engines": [_engine(each) for each in answers],
    }


def _engine(each: EngineAnswer) -> dict[str, Any]:
    told = each.answer if isinstance(each.answer, LedgerAnswer) else None
    return {
        "engine": each.engine,
        "answer": "given" if told is not None else each.answer,
        "pending": told.pending if told is not None else None,
        "owed": each.owed,
    }


def _readers(engine: str, answer: LedgerAnswer | Silence, span: str) -> dict[str, Any]:
    found = answer.spans.get(span) if isinstance(answer, LedgerAnswer) else None
    return {
        "engine": engine,
        "turns": found.turns if found is not None else None,
        "lineages": found.lineages if found is not None else None,
        "from": found.first if found is not None else None,
    }
