"""Forgets with a proof: each engine that may hold a session forgets it, and looks for what is left.

The proxy looks in its own places afterwards. It never vouches for a place that it or an engine
could not look at.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog

from leyline_engine.contract import NONCE_BYTES, PROVE_ACTION, ProofPlace, ProvePayload, TurnRecord

from ..admission import FairPlaces
from ..audit.proofs import NO_SUPPORT, engine_document, places_verdict, verdict_of
from ..errors import BadRequestError, ProxyError
from ..model.places import erased, is_unknown_run
from ..model.session import Place, Session
from ..model.spans import ANYTHING
from ..request.side_bodies import ProofBody
from ..sessions.ledger import session_spans
from ..upstream.pool import ReplicaPool
from ..upstream.replica import Replica
from .erasure import ask_forget
from .forgets import SessionForgets, no_session
from .ports import ProofLog

log = structlog.get_logger("leyline.proof")

STAYS = (
    "the client's own copy",
    "the newest list of messages, until the proxy has a newer one to compare with",
    "memories of other proxies at the same session store",
    "records that wait to be written to the audit log",
    "states that policies of one's own keep",
    "memory that servers have freed, and what an operating system swapped out",
    "responses that are stored on demand, unless they were deleted",
)
"""Places that a proof doesn't cover."""

_AT_ONCE = 2
"""Proofs that one engine is asked for at once; of one tenant there is one."""
_WAITING = 256
_PLACE_WAIT_S = 60.0
"""Longest wait until an engine may be asked."""

_LOOKS_S = (0.02, 0.05, 0.1, 0.25)
"""Pauses between two looks for a pending proof; the last is repeated."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The result of asking one run of an engine."""

    run: str
    seen: Place
    document: dict[str, Any]
    confirmed: bool
    """True if the engine confirmed the forget, whatever the proof says."""


class ForgetProofs:
    """Forgets sessions with a proof.

    Args:
        audit: records and signs proofs.
    """

    def __init__(
        self,
        forgets: SessionForgets,
        pool: ReplicaPool,
        *,
        audit: ProofLog,
        hints_secret: str | None,
    ) -> None:
        self._forgets = forgets
        self._pool = pool
        self._audit = audit
        self._hints_secret = hints_secret
        self._engines = {
            replica.name: FairPlaces(_AT_ONCE, of_tenant=1, waiting=_WAITING, wait_s=_PLACE_WAIT_S)
            for replica in pool
        }

    async def prove(self, tenant: str, session_id: str, body: ProofBody) -> dict[str, Any]:
        """Forget a session, or spans of it, and return the signed proof.

        Raises:
            NotFoundError: the tenant has no such session.
            BadRequestError: a span that the session doesn't know.
            SessionStoreGoneError: the demand could not be kept.
            ForgetsOwedError: too many forgets of the tenant wait already.
        """
        before, after = await self._demand(tenant, session_id, body)
        forgets, responses = self._forgets, self._forgets.responses
        forgets.named.drop(tenant, session_id)
        async with forgets.erasures.during(after):
            await forgets.remove_texts(before, after, body.spans)
            asked = await asyncio.gather(
                *(
                    self._ask((tenant, session_id), run, place, body)
                    for run, place in self._places(after).items()
                )
            )
            await self._settle(tenant, session_id, asked, whole=not body.spans)
        deleted = 0
        if body.responses:
            deleted = await responses.delete_from(tenant, session_id, 0)
        places = await self._own_places(before, after)
        engines = [each.document for each in asked]
        parts = [each["verdict"] for each in engines] + [places_verdict(places)]
        if not engines or before.untraced:
            parts.append("not_proven")
        proof = {
            "session": session_id,
            "tenant": tenant,
            "spans": list(body.spans),
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "verdict": verdict_of(parts),
            "unreachable": before.untraced > 0,
            "engines": engines,
            "places": [msgspec.to_builtins(place) for place in places],
            "responses": {"held": await responses.count_in(tenant, session_id), "deleted": deleted},
            "stays": list(STAYS),
        }
        return self._audit.proven(proof)

    async def _demand(
        self, tenant: str, session_id: str, body: ProofBody
    ) -> tuple[Session, Session]:
        """Note the forget with the session; returns it as it was, and as it is now."""
        found = await self._forgets.session(tenant, session_id)
        known = session_spans(found)
        for number, span in enumerate(body.spans):
            if span not in known:
                param = f"spans[{number}]"
                raise BadRequestError(
                    f"{param} names no message of this session; its ledger lists the names.",
                    param=param,
                )
        self._forgets.erasures.check(tenant)
        placing = self._forgets.placing
        before, after = await self._forgets.change(tenant, session_id, placing.forgotten)
        # A store names the turns in flight only when it is asked for a session.
        return replace(before, in_flight=before.in_flight | found.in_flight), after

    def _places(self, session: Session) -> Mapping[str, Place]:
        """Return the runs that may hold the session, and all others that can be asked."""
        anywhere = self._forgets.placing.anywhere()
        here = {run: each for run, each in anywhere.items() if not is_unknown_run(run)}
        return {**here, **session.places}

    async def _ask(self, owner: tuple[str, str], run: str, place: Place, body: ProofBody) -> _Asked:
        # Search by run first: the replica may have another name now.
        replica = self._pool.holding(run) or self._pool.get(place.replica)

        def failed(reason: str, *, confirmed: bool = False) -> _Asked:
            document = engine_document(place.replica, run, None, reason)
            return _Asked(run, place, document, confirmed)

        if replica is None or (problem := _problem(replica)):
            return failed(problem if replica is not None else "no such upstream is configured")
        demand = ProvePayload(nonce=secrets.token_hex(NONCE_BYTES))
        try:
            async with self._engines[replica.name].place(owner[0]):
                deadline = time.monotonic() + body.wait_s
                record = await ask_forget(
                    replica,
                    owner,
                    hints_secret=self._hints_secret,
                    spans=body.spans or (ANYTHING,),
                    prove=demand,
                )
            if record is None:
                return failed("the engine did not confirm the forget")
            record = await self._closed(replica, record, deadline)
        except ProxyError as error:
            return failed(f"the engine failed ({error.code})")
        receipt = record.receipt
        confirmed = receipt.forgot is not None
        if receipt.proof is None:
            ignored = any(each.action_type == PROVE_ACTION for each in receipt.skipped_actions)
            reason = NO_SUPPORT if ignored else "the engine gave no proof in time"
            return failed(reason, confirmed=confirmed)
        document = engine_document(place.replica, run, receipt.proof)
        document["overwritten"] = receipt.forgot.overwritten if receipt.forgot else 0
        return _Asked(run, place, document, confirmed)

    async def _closed(self, replica: Replica, record: TurnRecord, deadline: float) -> TurnRecord:
        """Return a record once its proof is closed, or the last one before the deadline."""
        pauses = iter(_LOOKS_S)
        while record.receipt.proof is None or record.receipt.proof.pending:
            if any(each.action_type == PROVE_ACTION for each in record.receipt.skipped_actions):
                break
            left = deadline - time.monotonic()
            if left <= 0:
                break
            await asyncio.sleep(min(next(pauses, _LOOKS_S[-1]), left))
            record = await replica.client.record(record.receipt.message_id) or record
        return record

    async def _settle(
        self, tenant: str, session_id: str, asked: Sequence[_Asked], *, whole: bool
    ) -> None:
        """Note which engines have forgotten; the others still owe it, as without a proof."""
        done = [each for each in asked if each.confirmed]

        def change(now: Session | None) -> Session:
            if now is None:
                raise no_session()
            places: Mapping[str, Place] = now.places
            for each in done:
                if whole:
                    places = erased(places, each.run, each.seen)
                elif places.get(each.run) == each.seen:
                    places = {**places, each.run: replace(each.seen, owed=False)}
            return replace(now, places=places)

        try:
            after = await self._forgets.store.update(tenant, session_id, change)
            self._forgets.erasures.start(after)
        except ProxyError as error:
            log.warning("proof_unsettled", error=error.code)

    async def _own_places(self, before: Session, after: Session) -> list[ProofPlace]:
        """Look for the session's text in the proxy's own places."""
        places = [
            await self._stored(before, after),
            self._forgets.named.left(before.tenant, before.id),
        ]
        if self._forgets.kept is not None:
            places += await self._forgets.kept.left(before.tenant, before.id, after.demands)
        return places

    async def _stored(self, before: Session, after: Session) -> ProofPlace:
        store = self._forgets.store
        now = await store.get(before.tenant, before.id)
        if store.problem is not None:
            return ProofPlace(place="session", unscanned="the session store can't be reached")
        turns = now.turns if now is not None else ()
        held = [turn.turn for turn in turns if turn.rendered.tokens or turn.output_ids]
        # A turn in flight was sent before the forget, whenever it ends.
        then = {turn.turn for turn in before.turns} | before.in_flight
        again = sum(name not in then for name in held)
        written = len(now.completions) if now is not None and now.demands == after.demands else 0
        asides = now.asides if now is not None else ()
        left = len(set(before.asides).intersection(asides))
        return ProofPlace(
            place="session",
            scanned=len(turns) + written + len(asides),
            survivors=len(held) - again + written + left,
            sent_again=again + len(asides) - left,
        )


def _problem(replica: Replica) -> str:
    """Return the reason why an engine can't be asked; empty if it can."""
    if not replica.status.up:
        return "the engine can't be reached"
    if replica.status.capability is None:
        return "a plain server, in which no forget finds anything"
    return ""
