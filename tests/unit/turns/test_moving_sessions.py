"""A session that moves between engines while its turns are under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest
from support.fake_engine import CAPABILITY, MODEL, Answer, FakeEngine, chat_json, forgotten
from support.waiting import wait

from leyline_engine.contract import Receipt, TokenCounts
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.model.session import Place, Session
from leyline_proxy.sessions.summary import SessionOverview
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.rendezvous import ranked

CHAT = "/v1/chat/completions"
REDACT = "redact:pattern='key=[0-9]+',replacement='[gone]'"
ASKED = [{"role": "user", "content": "key=7391"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "go"}]
SESSION = next(f"s{n}" for n in range(99) if ranked(f"s{n}", {"a": 1.0, "b": 1.0})[0] == "a")


@dataclass
class Pair:
    """Two engines under one proxy."""

    engines: dict[str, FakeEngine]
    app: Any
    origin: str

    def drain(self, name: str, draining: bool) -> None:
        self.app.state.services.pool.get(name).draining = draining

    def ask(
        self, messages: list[dict[str, Any]], session: str = SESSION, **members: Any
    ) -> httpx.Response:
        return httpx.post(
            f"{self.origin}{CHAT}",
            json={"model": MODEL, "messages": messages, **members},
            headers={"x-leyline-session": session},
            timeout=20,
        )

    def redact(self, messages: list[dict[str, Any]], session: str = SESSION) -> httpx.Response:
        return self.ask(messages, session, leyline={"policy": REDACT})

    def forgets(self, name: str, session: str = SESSION) -> int:
        """Requests of its own by which an engine was asked to forget a session."""
        own = [body for body in self.engines[name].bodies if b'"content":"."' in body]
        return sum(f'"session":"{session}"'.encode() in body for body in own)

    def obey(self, obeys: bool) -> None:
        """Have the engines confirm their orders from now on, or not."""
        for engine in self.engines.values():
            engine.receipt = forgotten if obeys else deaf

    def sessions(self) -> Sequence[SessionOverview]:
        """Lines of the sessions that the proxy keeps."""
        return asyncio.run(self.app.state.services.store.sessions("default"))

    def places(self) -> Mapping[str, Place]:
        """The places where the KV of the one session lies."""
        (line,) = self.sessions()
        session: Session = asyncio.run(self.app.state.services.store.get("default", line.id))
        return session.places

    @property
    def waiting(self) -> int:
        """Sessions that wait for an engine to confirm a forget."""
        count: int = self.app.state.services.erasures.waiting
        return count


def deaf(message_id: str) -> Receipt:
    """The receipt of an engine that forgot nothing."""
    return Receipt(message_id=message_id, tokens=TokenCounts(prompt=1, prefilled=1))


@contextmanager
def pair(**settings: Any) -> Iterator[Pair]:
    with ExitStack() as stack:
        engines, origins = {}, {}
        for name in ("a", "b"):
            engine = FakeEngine(capability=msgspec.structs.replace(CAPABILITY, instance=f"{name}1"))
            engine.receipt = forgotten
            engines[name], origins[name] = engine, stack.enter_context(serving(engine))
        app = create_app(
            Settings(upstreams=origins, log_level="error", handshake_interval_s=0.2, **settings)
        )
        yield Pair(engines, app, stack.enter_context(serving(app)))


def test_a_forget_reaches_an_engine_that_is_still_at_work_on_an_earlier_turn() -> None:
    """The turn isn't settled when the session moves; what it reads is forgotten all the same."""
    with pair() as found:
        found.drain("a", True)
        assert found.ask(ASKED).status_code == 200
        found.drain("a", False)
        slow = found.engines["a"]
        slow.answers = [chat_json()]
        slow.answers[0].pause_s = 1.0
        earlier = threading.Thread(target=found.ask, args=(ANSWERED,))
        earlier.start()
        wait(lambda: slow.bodies)
        assert f"{'f' * 16}@a1" in found.places()
        found.drain("a", True)
        assert found.ask(ANSWERED, leyline={"policy": REDACT}).status_code == 200
        earlier.join()
        wait(lambda: found.forgets("a"))


def test_a_forget_of_a_turn_whose_client_left_is_carried_as_well() -> None:
    """The engine was given the demand, so the others owe it, with or without a client waiting."""
    with pair() as found:
        assert found.ask(ASKED).status_code == 200
        found.drain("a", True)
        hanging = found.engines["b"]
        hanging.answers = [Answer(hangs=True)]
        with ExitStack() as stack:
            client = stack.enter_context(httpx.Client(timeout=0.5))
            with suppress(httpx.ReadTimeout):
                client.post(
                    f"{found.origin}{CHAT}",
                    json={"model": MODEL, "messages": ANSWERED, "leyline": {"policy": REDACT}},
                    headers={"x-leyline-session": SESSION},
                )
        wait(lambda: found.forgets("a"))


def test_losses_of_account_are_forgotten_at_every_engine() -> None:
    """Text without a name in the account may have been read anywhere."""
    with pair() as found:
        assert found.ask(ANSWERED).status_code == 200
        assert set(found.places()) == {f"{'f' * 16}@a1", f"{'f' * 16}@b1"}
        assert found.ask(ANSWERED, leyline={"policy": REDACT}).status_code == 200
        wait(lambda: found.forgets("b"))


FAILURES = {
    "500": Answer([b"{}"], status=500),
    "400": Answer([b"{}"], status=400),
    "504": Answer(hangs=True),
    "broken": Answer([b'{"choices":'], breaks=True),
    "silent": None,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_an_engine_owes_what_it_did_not_confirm(failure: str) -> None:
    """It is asked until it confirms, whatever becomes of the turn that demands it."""
    limit_s = 3.0 if failure == "504" else None
    with pair(failover=False, total_timeout_s=limit_s) as found:
        assert found.ask(ASKED).status_code == 200
        found.obey(False)
        answer = FAILURES[failure]
        if answer is not None:
            found.engines["a"].answers = [answer]
        failed = found.redact(ANSWERED)
        if answer is None:
            account = failed.json()["leyline"]
            assert account["forgot"] == {"result": "owed"}
            assert account["forgets_owed"] > 0
        else:
            assert failed.status_code >= 400
        wait(lambda: found.forgets("a"))
        assert found.waiting == 1
        found.obey(True)
        wait(lambda: not found.waiting)
        assert found.redact(ANSWERED).json()["leyline"]["forgot"]["overwritten"] == 3
        wait(lambda: not found.waiting)


@pytest.mark.parametrize("failure", [name for name, each in FAILURES.items() if each is not None])
def test_a_demand_that_a_plain_server_failed_is_owed_by_the_others(failure: str) -> None:
    """They hold what they held before, whatever became of the turn."""
    with pair(failover=False, total_timeout_s=2.0) as found:
        assert found.ask(ASKED).status_code == 200
        plain = found.engines["b"]
        plain.capability, answer = None, FAILURES[failure]
        handshake = found.app.state.services.pool.get("b").handshake
        wait(lambda: handshake.status.up and handshake.status.capability is None)
        found.drain("a", True)
        plain.answers = [answer] if answer is not None else []
        assert found.redact(ANSWERED).status_code >= 400
        wait(lambda: found.forgets("a"))


def test_a_demand_that_reached_no_engine_is_carried_when_one_is_back() -> None:
    """The connection was refused, so that the engine was never given the turn."""
    with pair(failover=False) as found:
        assert found.ask(ASKED).status_code == 200
        link = found.app.state.services.pool.get("a").client._link
        with pytest.MonkeyPatch.context() as patched:

            async def refused(*_: Any, **__: Any) -> Any:
                raise httpx.ConnectError("refused")

            patched.setattr(link._transport, "handle_async_request", refused)
            assert found.redact(ANSWERED).status_code == 502
            assert found.waiting == 1
        wait(lambda: found.forgets("a"))
        wait(lambda: not found.waiting)


def test_a_demand_that_could_not_be_remembered_is_refused() -> None:
    """A tenant with too many debts is refused before anything is sent; plain turns continue."""
    with pair(max_owed_forgets=1) as found:
        found.obey(False)
        assert found.redact(ANSWERED, "first").status_code == 200
        refused = found.redact(ANSWERED, "second")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "forgets_owed"
        assert int(refused.headers["retry-after"]) > 0
        sent = [body for engine in found.engines.values() for body in engine.bodies]
        assert not [body for body in sent if b'"second"' in body]
        assert found.ask(ASKED, "third").status_code == 200
        found.obey(True)
        wait(lambda: not found.waiting)
        assert found.redact(ANSWERED, "second").status_code == 200


def test_a_debt_outlives_its_session() -> None:
    """A session that was pushed out of memory is still forgotten by its engines."""
    with pair(max_sessions=1) as found:
        found.obey(False)
        assert found.redact(ANSWERED).status_code == 200
        assert found.ask(ASKED, "another").status_code == 200
        assert [line.id for line in found.sessions()] == ["another"]
        before = found.forgets("a")
        wait(lambda: found.forgets("a") >= before + 2)
        assert found.waiting == 1
        found.obey(True)
        wait(lambda: not found.waiting)


def test_a_turn_that_a_forget_overtook_is_forgotten_when_it_ends() -> None:
    """The engine confirmed the forget while the turn still read what had to go."""
    with pair(failover=False) as found:
        assert found.ask(ASKED).status_code == 200
        slow = found.engines["a"]
        slow.answers = [chat_json()]
        slow.answers[0].pause_s = 1.0
        earlier = threading.Thread(target=found.ask, args=(ANSWERED,))
        earlier.start()
        wait(lambda: len(slow.bodies) == 2)
        account = found.redact(ANSWERED).json()["leyline"]
        assert account["forgot"]["overwritten"] == 3
        wait(lambda: not found.waiting)
        carried = found.forgets("a")
        earlier.join()
        wait(lambda: found.forgets("a") > carried)


def test_a_turn_that_ended_while_a_forget_was_under_way_is_forgotten() -> None:
    """The engine may have been given it after the forget, which it confirmed only later."""
    with pair(failover=False) as found:
        assert found.ask(ASKED).status_code == 200
        engine = found.engines["a"]
        engine.answers = [chat_json(), chat_json()]
        engine.answers[0].pause_s, engine.answers[1].pause_s = 0.5, 1.5
        earlier = threading.Thread(target=found.ask, args=(ANSWERED,))
        earlier.start()
        wait(lambda: len(engine.bodies) == 2)
        account = found.redact(ANSWERED).json()["leyline"]
        earlier.join()
        assert account["forgot"]["result"] == "owed"
        wait(lambda: found.forgets("a"))


def test_what_an_engine_was_not_told_the_owner_of_is_unreachable() -> None:
    """It served a turn while its plugin could not be asked; a later forget can't find that."""
    with pair(failover=False) as found:
        engine = found.engines["a"]
        capability, engine.capability = engine.capability, None
        handshake = found.app.state.services.pool.get("a").handshake
        wait(lambda: handshake.status.capability is None)
        assert found.ask(ASKED).status_code == 200
        engine.capability = capability
        wait(lambda: handshake.status.capability is not None)
        account = found.redact(ANSWERED).json()["leyline"]
        assert account["forgot"]["result"] == "unreachable"
        later = [
            *ANSWERED,
            {"role": "assistant", "content": "Hm."},
            {"role": "user", "content": "key=99"},
        ]
        assert found.ask(later, leyline={"policy": "keep_all"}).status_code == 200
        account = found.redact(later).json()["leyline"]
        assert account["forgot"]["result"] != "unreachable", (
            "this one came under the session's name"
        )


@pytest.mark.parametrize("under_way", [True, False])
def test_a_lost_session_that_a_plain_server_may_have_served_is_unreachable(under_way: bool) -> None:
    """Its name is known to the engines that take forgets, and says nothing to the other."""
    with pair(max_sessions=1) as found:
        found.engines["b"].capability = None
        handshake = found.app.state.services.pool.get("b").handshake
        wait(lambda: handshake.status.up and handshake.status.capability is None)
        if under_way:
            found.drain("a", True)
            assert found.ask(ASKED).status_code == 200
            found.drain("a", False)
            assert found.ask(ASKED, "another").status_code == 200
        account = found.redact(ANSWERED if under_way else ASKED).json()["leyline"]
        assert (account["forgot"]["result"] == "unreachable") is under_way
