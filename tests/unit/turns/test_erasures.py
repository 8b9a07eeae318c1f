"""Forgets on their way to engines that a session has left, before scripted engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from support.fake_engine import CAPABILITY, Answer, FakeEngine, chat_json, forgotten
from support.metrics_page import value_of
from support.replicas import replica_over
from support.waiting import until

from leyline_engine.contract import ForgetCounts
from leyline_proxy.audit import followup
from leyline_proxy.audit.writer import AuditWriter
from leyline_proxy.debts import Debt, DebtBook, DebtStore, MemoryDebtStore
from leyline_proxy.model.places import after_turn, owed, unknown_run
from leyline_proxy.model.session import Place, Session
from leyline_proxy.observe.auditor import Auditor
from leyline_proxy.sessions.memory import MemorySessionStore
from leyline_proxy.settings import Settings
from leyline_proxy.telemetry.metrics import Metrics
from leyline_proxy.turns.erasure import PLAIN_GRACE_S, Erasures
from leyline_proxy.upstream.pool import ReplicaPool
from leyline_proxy.wiring.audit import build_auditor

TENANT = "red"


@dataclass
class World:
    """Two engines, a store, and what carries forgets."""

    engines: dict[str, FakeEngine]
    pool: ReplicaPool
    store: MemorySessionStore
    erasures: Erasures
    metrics: Metrics

    def run(self, name: str) -> str:
        replica = self.pool.get(name)
        assert replica is not None
        return replica.status.retains_as

    async def owe(self, session_id: str, places: dict[str, Place]) -> None:
        now = time.time()
        session = Session(session_id, TENANT, "", (), (), 1, now, created=now, places=places)
        await self.store.update(TENANT, session_id, lambda _: session)
        self.erasures.start(session)

    async def places(self, session_id: str) -> dict[str, Place]:
        session = await self.store.get(TENANT, session_id)
        assert session is not None
        return dict(session.places)

    async def paid(self, session_id: str) -> None:
        async def nothing_owed() -> bool:
            return not owed(await self.places(session_id))

        await until(nothing_owed)


@asynccontextmanager
async def world(
    store: MemorySessionStore | None = None,
    audit: Auditor | None = None,
    debts: DebtStore | None = None,
    *,
    plain_grace_s: float = PLAIN_GRACE_S,
) -> AsyncIterator[World]:
    engines, replicas, metrics = {}, [], Metrics()
    for name in ("a", "b"):
        engine = FakeEngine(capability=msgspec.structs.replace(CAPABILITY, instance=f"{name}1"))
        engine.receipt = forgotten
        engines[name] = engine
        replicas.append(replica_over(engine, name, metrics=metrics))
    pool = ReplicaPool(replicas)
    await pool.refresh()
    store = store or MemorySessionStore(max_sessions=100, ttl_s=60)
    audit = audit or build_auditor(Settings(upstream="http://e"), metrics)
    erasures = Erasures(
        pool,
        store,
        metrics,
        audit,
        debts or MemoryDebtStore(),
        hints_secret=None,
        retry_s=0.05,
        max_owed=100,
        plain_grace_s=plain_grace_s,
    )
    task = asyncio.create_task(erasures.run())
    try:
        yield World(engines, pool, store, erasures, metrics)
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await pool.aclose()


def moved(run: str, name: str, *, demanded: bool) -> Callable[[Session | None], Session]:
    def change(session: Session | None) -> Session:
        assert session is not None
        return replace(session, places=after_turn(session.places, run, name, demanded=demanded))

    return change


async def test_a_turn_that_an_engine_is_given_during_an_erasure_is_not_forgotten() -> None:
    """KV that the session leaves there meanwhile is erased, too."""
    async with world() as w:
        run = w.run("a")
        w.engines["a"].answers = [replace(chat_json(), pause_s=0.3)]
        await w.owe("s", {run: Place("a", owed=True)})
        await until(lambda: w.engines["a"].bodies)
        await w.store.update(TENANT, "s", moved(run, "a", demanded=False))
        await w.paid("s")
        assert len(w.engines["a"].bodies) == 2


async def test_a_forget_that_is_demanded_during_an_erasure_is_carried_too() -> None:
    """The erasure under way may have come before what the new demand is about."""
    async with world() as w:
        run = w.run("a")
        w.engines["a"].answers = [replace(chat_json(), pause_s=0.3)]
        await w.owe("s", {run: Place("a", owed=True)})
        await until(lambda: w.engines["a"].bodies)
        await w.store.update(TENANT, "s", moved(run, "a", demanded=False))
        later = await w.store.update(TENANT, "s", moved(w.run("b"), "b", demanded=True))
        w.erasures.start(later)
        await w.paid("s")
        assert len(w.engines["a"].bodies) == 2


async def test_a_forget_for_a_run_that_was_mistaken_reaches_the_engine() -> None:
    """An engine may have been restarted before anyone noticed, and then served the turn."""
    async with world() as w:
        await w.owe("s", {"fffffffffffffffff@a0": Place("a", owed=True)})
        await w.paid("s")
        assert len(w.engines["a"].bodies) == 1


async def test_a_forget_follows_an_engine_that_was_renamed() -> None:
    """Its run says who it is."""
    async with world() as w:
        await w.owe("s", {w.run("b"): Place("old", owed=True)})
        await w.paid("s")
        assert (len(w.engines["a"].bodies), len(w.engines["b"].bodies)) == (0, 1)


async def test_a_forget_for_an_engine_that_this_proxy_doesnt_know_stays_owed() -> None:
    """Another proxy with another list may know it."""
    async with world() as w:
        assert w.erasures.waiting == 0
        await w.owe("s", {"f@x": Place("elsewhere", owed=True)})
        for _ in range(20):
            assert w.erasures.waiting == 1, "between two tries, too"
            await asyncio.sleep(0.01)
        assert owed(await w.places("s")) == {"f@x": "elsewhere"}


async def test_what_is_paid_is_no_longer_owed() -> None:
    """The count of what waits goes back to 0, and so it does for a session that is gone."""
    async with world() as w:
        await w.owe("s", {w.run("a"): Place("a", owed=True)})
        await w.owe("t", {"f@x": Place("elsewhere", owed=True)})
        assert w.erasures.waiting == 2
        await w.paid("s")
        await w.store.delete(TENANT, "t")
        await until(lambda: not w.erasures.waiting)


async def test_an_engine_that_hangs_keeps_no_forget_from_another() -> None:
    """Forgets of other sessions at other engines are carried meanwhile."""
    async with world() as w:
        w.engines["a"].answers = [Answer(hangs=True)] * 3
        await w.owe("s", {w.run("a"): Place("a", owed=True)})
        await asyncio.sleep(0.05)
        await w.owe("t", {w.run("b"): Place("b", owed=True)})
        await w.paid("t")
        assert owed(await w.places("s"))
        assert w.erasures.waiting == 1, "what is under way isn't paid"


async def test_a_store_that_is_gone_loses_no_debt() -> None:
    """A session that can't be read for a while is looked at again."""

    class Gone(MemorySessionStore):
        gone = True

        @property
        def problem(self) -> str | None:
            return "gone" if self.gone else None

        async def get(self, tenant: str, session_id: str) -> Session | None:
            found = await super().get(tenant, session_id)
            return replace(found, places={}) if self.gone and found is not None else found

    store = Gone(max_sessions=10, ttl_s=60)
    async with world(store) as w:
        await w.owe("s", {w.run("a"): Place("a", owed=True)})
        await asyncio.sleep(0.2)
        store.gone = False
        await w.paid("s")
        assert len(w.engines["a"].bodies) == 1


@pytest.mark.parametrize("settled", [True, False])
async def test_an_engine_that_answers_as_a_plain_server_owes_until_its_grace_ends(
    settled: bool,
) -> None:
    """A missing capability document doesn't prove that the run has ended, so nothing is paid."""
    async with world(plain_grace_s=0.3 if settled else 0.0) as w:
        replica = w.pool.get("a")
        assert replica is not None
        before = replica.status
        run = w.run("a")
        replica.handshake.status = replace(before, capability=None, settled=settled)
        await w.owe("s", {run: Place("a", owed=True)})
        await asyncio.sleep(0.15)
        assert owed(await w.places("s"))
        if settled:
            await w.paid("s")
            assert value_of(w.metrics.erasures.labels("lost")) == 1
            assert value_of(w.metrics.erasures.labels("gone")) == 0


async def test_an_engine_whose_capability_document_is_back_is_asked() -> None:
    """The same run confirms the forget as soon as the proxy sees its document again."""
    async with world() as w:
        replica = w.pool.get("a")
        assert replica is not None
        before, run = replica.status, w.run("a")
        replica.handshake.status = replace(before, capability=None, settled=True)
        await w.owe("s", {run: Place("a", owed=True)})
        await asyncio.sleep(0.15)
        assert not w.engines["a"].bodies
        replica.handshake.status = before
        await w.paid("s")
        assert len(w.engines["a"].bodies) == 1
        assert value_of(w.metrics.erasures.labels("lost")) == 0


async def test_the_grace_begins_again_with_each_disappearance() -> None:
    """A capability document that was seen meanwhile proves that the engine still has its KV."""
    async with world(plain_grace_s=1.0) as w:
        replica, engine = w.pool.get("a"), w.engines["a"]
        assert replica is not None
        before, run = replica.status, w.run("a")
        hidden = replace(before, capability=None, settled=True)
        replica.handshake.status = hidden
        await w.owe("s", {run: Place("a", owed=True)})
        await asyncio.sleep(0.6)
        engine.scripted["/"] = Answer([b"{}"], status=500)
        replica.handshake.status = before
        await asyncio.sleep(0.2)
        replica.handshake.status = hidden
        await asyncio.sleep(0.6)
        assert owed(await w.places("s"))
        await w.paid("s")
        assert value_of(w.metrics.erasures.labels("lost")) == 1


@pytest.mark.parametrize("status", [401, 403, 429, 500, 502, 503, 504])
async def test_an_engine_that_could_not_be_asked_has_not_ended(status: int) -> None:
    """It holds what it held, and owes the forget until it confirms it."""
    async with world() as w:
        run, engine = w.run("a"), w.engines["a"]
        engine.scripted["/"] = Answer([b"{}"], status=status)
        await w.pool.refresh()
        await w.owe("s", {run: Place("a", owed=True)})
        await asyncio.sleep(0.2)
        assert owed(await w.places("s"))
        engine.scripted.clear()
        await w.pool.refresh()
        await w.paid("s")
        assert len(engine.bodies) == 1


async def test_an_engine_that_was_out_of_reach_is_asked_when_it_is_back() -> None:
    """It may have gone on all the while, whether or not it splices."""
    async with world() as w:
        engine = w.engines["a"]
        engine.capability = msgspec.structs.replace(CAPABILITY, splices=False)
        await w.pool.refresh()
        await w.owe("s", {unknown_run("a"): Place("a", owed=True)})
        await w.paid("s")
        assert len(engine.bodies) == 1


async def test_a_plain_server_that_was_out_of_reach_has_not_ended() -> None:
    """No forget finds KV in it, so the debt is counted as lost."""
    async with world(plain_grace_s=0.0) as w:
        w.engines["a"].capability = None
        await w.pool.refresh()
        await w.owe("s", {unknown_run("a"): Place("a", owed=True)})
        await w.paid("s")
        assert value_of(w.metrics.erasures.labels("lost")) == 1


@pytest.mark.parametrize("given_up", [False, True])
async def test_what_running_requests_hold_is_paid_and_not_called_erased_before_they_end(
    monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    """The engine owes nothing more, and the log says what is overwritten only when it is."""
    told: list[str] = []
    monkeypatch.setattr(followup, "_TRIES", 1 if given_up else 14)
    writer = SimpleNamespace(offer=lambda job, _: told.append(job()["result"]))
    async with world(audit=Auditor(cast(AuditWriter, writer))) as w:
        engine = w.engines["a"]
        held = ForgetCounts(overwritten=1, pending=2)
        engine.receipt = lambda name: msgspec.structs.replace(forgotten(name), forgot=held)
        await w.owe("s", {w.run("a"): Place("a", owed=True)})
        await w.paid("s")
        assert len(engine.bodies) == 1
        await asyncio.sleep(0.25)
        assert told == ["pending"]
        if given_up:
            return
        engine.receipt = forgotten
        await until(lambda: told != ["pending"])
        assert told == ["pending", "erased"]
        assert len(engine.bodies) == 1, "it isn't asked to forget anew"


async def test_an_inherited_debt_is_carried_and_paid() -> None:
    """Debts of a process that has gone are sent from here, also of a session that doesn't know."""
    book = DebtBook()
    async with world(debts=MemoryDebtStore(book)) as w:
        gone = MemoryDebtStore(book)
        runs = {name: w.run(name) for name in w.engines}
        await gone.write([Debt(TENANT, "s", run, name) for name, run in runs.items()], [])
        session = Session("s", TENANT, "", (), (), 1, 1.0, created=1.0)
        await w.store.update(TENANT, "s", lambda _: session)
        book.leave(gone)
        await until(lambda: not len(book), 10)
        assert [len(each.bodies) for each in w.engines.values()] == [1, 1]


async def test_the_store_of_debts_knows_what_is_owed_and_no_more() -> None:
    """A debt is there once :meth:`saved` returns, stays while its engine is down, and goes with the
    engine's confirmation."""
    book = DebtBook()
    async with world(debts=MemoryDebtStore(book)) as w:
        w.engines["a"].answers = [Answer(status=503)] * 3
        await w.owe("s", {w.run("a"): Place("a", owed=True)})
        await w.erasures.saved()
        assert len(book) == 1
        await w.paid("s")
        await until(lambda: not len(book))
        assert w.erasures.debts.unsaved == 0


async def test_a_demand_under_way_is_owed_if_its_process_dies() -> None:
    """It is noted before the engine gets the turn, carried by nobody here, and ends with it."""
    book = DebtBook()
    async with world(debts=MemoryDebtStore(book)) as w:
        await w.erasures.demanded((TENANT, "s"), "t1", {w.run("a"): "a"})
        await w.erasures.demanded((TENANT, "s"), "t2", {w.run("a"): "a", w.run("b"): "b"})
        assert (len(book), w.erasures.waiting) == (2, 0)
        session = Session("s", TENANT, "", (), (), 1, 1.0, created=1.0)
        w.erasures.start(session, "t2")
        await w.erasures.saved()
        assert len(book) == 1, "the other turn still demands it there"
        w.erasures.start(session, "t1")
        await w.erasures.saved()
        assert len(book) == 0
        assert not any(each.bodies for each in w.engines.values())


async def test_a_later_demand_hides_no_debt_that_the_session_never_knew() -> None:
    """A forget of a run that isn't among the session's places is sent beside those that are."""
    async with world() as w:
        w.engines["a"].answers = [Answer(status=503)]
        w.erasures.owe(TENANT, "s", w.run("a"), "a")
        await w.owe("s", {w.run("b"): Place("b", owed=True)})
        await until(lambda: not w.erasures.waiting)
        assert all(any(b'"s"' in body for body in each.bodies) for each in w.engines.values())
