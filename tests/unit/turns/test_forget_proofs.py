"""Forgets with a proof, before scripted engines: never called clean without a look."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from support.fake_engine import CAPABILITY, FakeEngine, forgotten
from support.replicas import replica_over
from support.sessions import turn_change

from leyline_engine.contract import (
    PLACES,
    PROVE_ACTION,
    RECORDS,
    Proof,
    ProofPlace,
    Receipt,
    SkippedAction,
)
from leyline_proxy.debts import DebtBook, MemoryDebtStore
from leyline_proxy.errors import NotFoundError
from leyline_proxy.model.asides import Anchor, Aside
from leyline_proxy.model.places import owed
from leyline_proxy.model.session import Place, Session
from leyline_proxy.request.side_bodies import ProofBody
from leyline_proxy.sessions.contents import ContentIndex
from leyline_proxy.sessions.memory import MemorySessionStore
from leyline_proxy.sessions.stored_responses import MemoryResponseStore, ResponseShelf
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.turns.erasure import Erasures
from leyline_proxy.turns.forgets import SessionForgets
from leyline_proxy.turns.named import NamedSources
from leyline_proxy.turns.placing import Placing
from leyline_proxy.turns.ports import KeptText
from leyline_proxy.turns.proving import ForgetProofs
from leyline_proxy.turns.retaining import known
from leyline_proxy.upstream.pool import ReplicaPool
from leyline_proxy.wiring.audit import build_auditor

LOOKED = tuple(ProofPlace(place=name) for name in sorted({*PLACES, RECORDS}))
CLEAN = Proof(pending=False, doomed=3, digested=3, places=LOOKED)
PART = ProofPlace(place="pool.tree", chance=1)
NOW = ProofBody(wait_s=0.05)


@dataclass
class World:
    """One engine, a session on it, and what proves its forget."""

    engine: FakeEngine
    store: MemorySessionStore
    proofs: ForgetProofs
    erasures: Erasures
    debts: DebtBook

    async def prove(self, body: ProofBody = NOW) -> dict[str, Any]:
        return await self.proofs.prove("red", "s", body)

    async def owing(self) -> bool:
        session = await self.store.get("red", "s")
        assert session is not None
        return bool(owed(session.places))


@asynccontextmanager
async def world(
    *, untraced: int = 0, known: bool = True, kept: KeptText | None = None
) -> AsyncIterator[World]:
    engine = FakeEngine(capability=msgspec.structs.replace(CAPABILITY, instance="a1"))
    metrics = Metrics()
    pool = ReplicaPool([replica_over(engine, "a", metrics=metrics)])
    await pool.refresh()
    store = MemorySessionStore(max_sessions=100, ttl_s=60)
    audit = build_auditor(Settings(upstream="http://e"), metrics)
    debts = DebtBook()
    held = MemoryDebtStore(debts)
    erasures = Erasures(pool, store, metrics, audit, held, hints_secret=None, retry_s=9, max_owed=9)
    replica = pool.get("a")
    assert replica is not None
    if known:
        now = time.time()
        places = {replica.status.retains_as: Place("a")}
        session = Session(
            "s", "red", "", (), (), 1, now, created=now, places=places, untraced=untraced
        )
        await store.update("red", "s", lambda _: session)
    forgets = SessionForgets(
        store=store,
        responses=MemoryResponseStore(ResponseShelf(ttl_s=60, max_responses=9, max_bytes=9_999)),
        placing=Placing(pool),
        erasures=erasures,
        named=NamedSources(ContentIndex()),
        kept=kept,
    )
    proofs = ForgetProofs(forgets, pool, audit=audit, hints_secret=None)
    yield World(engine, store, proofs, erasures, debts)
    await pool.aclose()


def with_proof(proof: Proof | None, **changes: Any) -> Callable[[str], Receipt]:
    return lambda name: msgspec.structs.replace(forgotten(name), proof=proof, **changes)


async def test_an_engines_proof_is_the_verdict() -> None:
    """A complete proof is clean, and the engine owes nothing any more."""
    async with world() as w:
        w.engine.receipt = with_proof(CLEAN)
        found = await w.prove()
        assert found["verdict"] == "clean" and not await w.owing()
        await w.prove()
        first, second = [nonce(body) for body in w.engine.bodies]
        assert len(bytes.fromhex(first)) == 32 and first != second


def nonce(body: bytes) -> str:
    """The nonce that a request asks a proof with."""
    actions = json.loads(body)["custom_params"]["kv_hints"]["actions"]
    (asked,) = [each["payload"] for each in actions if each["action_type"] == PROVE_ACTION]
    return str(asked["nonce"])


SKIPPED = (SkippedAction("p", PROVE_ACTION, "1.0"),)
UNPROVEN: dict[str, Callable[[str], Receipt]] = {
    "the engine makes no proofs": with_proof(None, skipped_actions=SKIPPED),
    "the engine gave no proof in time": with_proof(None),
    "running requests still hold": with_proof(msgspec.structs.replace(CLEAN, pending=True)),
    "only 2 of 3 rows": with_proof(msgspec.structs.replace(CLEAN, digested=2)),
    "no layer": with_proof(msgspec.structs.replace(CLEAN, unscanned="no layer")),
    "looked nowhere": with_proof(msgspec.structs.replace(CLEAN, places=())),
    "didn't look at index": with_proof(
        msgspec.structs.replace(
            CLEAN, places=tuple(each for each in LOOKED if each.place != "index")
        )
    ),
    "didn't look at records": with_proof(
        msgspec.structs.replace(
            CLEAN, places=tuple(each for each in LOOKED if each.place != "records")
        )
    ),
    "too many rows of others are equal in part: 1": with_proof(
        msgspec.structs.replace(CLEAN, places=(*LOOKED, PART))
    ),
    "origin: lost": with_proof(
        msgspec.structs.replace(CLEAN, places=(ProofPlace(place="origin", unscanned="lost"),))
    ),
}


@pytest.mark.parametrize("reason", UNPROVEN)
async def test_what_was_not_looked_at_is_not_clean(reason: str) -> None:
    """Each reason why an engine can't prove a forget is given, and the verdict says so."""
    async with world() as w:
        w.engine.receipt = UNPROVEN[reason]
        found = await w.prove()
        assert found["verdict"] == "not_proven"
        assert reason in found["engines"][0]["reason"]
        assert not await w.owing()  # the forget itself was confirmed


async def test_survivors_outweigh_all_else() -> None:
    """One survivor is the verdict, also of a pending proof."""
    async with world() as w:
        places = (ProofPlace(place="pool.free", survivors=1), ProofPlace(place="x", unscanned="y"))
        w.engine.receipt = with_proof(Proof(pending=True, places=places))
        assert (await w.prove())["verdict"] == "survivors"


async def test_a_forget_that_is_not_confirmed_stays_owed() -> None:
    """Without a receipt of the forget, nothing is proven, and the engine is asked again later."""
    async with world() as w:
        w.engine.receipt = lambda name: Receipt(message_id=name)
        found = await w.prove()
        assert found["verdict"] == "not_proven" and await w.owing()


class Slow:
    """Text in a place that never says it is gone."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def forget(self, tenant: str, session: str, turn: str, demands: int) -> None:
        self.asked.set()
        await asyncio.Event().wait()

    async def left(self, tenant: str, session: str, demands: int) -> tuple[ProofPlace, ...]:
        return ()


async def test_a_proof_that_is_cut_off_leaves_the_forget_to_others() -> None:
    """The engines owe the forget from the demand on, whatever stops the proof, also a kill."""
    slow = Slow()
    async with world(kept=slow) as w:
        proving = asyncio.create_task(w.prove())
        await slow.asked.wait()
        assert len(w.debts) == 1, "what a killed process leaves"
        proving.cancel()
        await asyncio.wait((proving,))
        assert await w.owing() and w.erasures.waiting == 1


async def test_text_without_a_name_is_never_proven_gone() -> None:
    """A conversation that came without a name may be where no forget finds it."""
    async with world(untraced=1) as w:
        w.engine.receipt = with_proof(CLEAN)
        found = await w.prove()
        assert found["verdict"] == "not_proven" and found["unreachable"]


async def test_an_unknown_session_is_refused() -> None:
    """There is nothing to forget, so nothing is proven."""
    async with world(known=False) as w:
        with pytest.raises(NotFoundError):
            await w.prove()


@pytest.mark.parametrize(("opened", "survivors"), [(True, 1), (False, 0)])
async def test_what_a_turn_in_flight_leaves_is_not_sent_again(opened: bool, survivors: int) -> None:
    """A turn that ends while a forget is proven was sent before it, if it was under way then."""
    async with world() as w:
        late = turn_change("s", [{"role": "user", "content": "a"}], tenant="red")(None)
        if opened:
            await w.store.open_turn("red", "s", late.turns[-1].turn)
        ended: list[asyncio.Future[Session]] = []

        def change(now: Session | None) -> Session:
            assert now is not None
            return replace(now, turns=late.turns)

        def receipt(message: str) -> Receipt:
            ended.append(asyncio.ensure_future(w.store.update("red", "s", change)))
            return with_proof(CLEAN)(message)

        w.engine.receipt = receipt
        places = {each["place"]: each for each in (await w.prove())["places"]}
        assert ended
        found = places["session"]["survivors"], places["session"]["sent_again"]
        assert found == (survivors, 1 - survivors)


async def test_what_a_hidden_turn_wrote_is_looked_for() -> None:
    """An aside of before a forget that comes back meanwhile survives; a later one is sent again."""
    old, new = (Aside(Anchor(1, 0), (), reasoning=text) for text in ("old", "new"))
    async with world() as w:
        await w.store.update("red", "s", lambda now: replace(known(now), asides=(old,)))
        written: list[asyncio.Future[Session]] = []

        def receipt(message: str) -> Receipt:
            change = w.store.update("red", "s", lambda now: replace(known(now), asides=(old, new)))
            written.append(asyncio.ensure_future(change))
            return with_proof(CLEAN)(message)

        w.engine.receipt = receipt
        found = await w.prove()
        places = {each["place"]: each for each in found["places"]}
        assert written and found["verdict"] == "survivors"
        assert (places["session"]["survivors"], places["session"]["sent_again"]) == (1, 1)
        w.engine.receipt = with_proof(CLEAN)
        assert (await w.prove())["verdict"] == "clean"
        session = await w.store.get("red", "s")
        assert session is not None and not session.asides
