"""One proxy before two engines: where sessions go, what follows them, what survives a failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from support.agent_history import agent_history
from support.engine_memory import holds_text, learn_words

from leyline_lab.stand_ins.serving import check_clean, serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import create_embedded_engine
from leyline_proxy.upstream.rendezvous import ranked

CHAT = "/v1/chat/completions"
SECRET = "key=7391"
REDACT = r"redact:pattern='key=\d+',replacement='[gone]'"
TRUNCATE = "truncate_older_than:n=1,max_chars=60"
SHORTER = "truncate_older_than:n=1,max_chars=20"
NAMES = ("a", "b")
PATIENCE_S = 20.0


@dataclass
class Engine:
    """A replay engine on a port of its own."""

    app: Starlette
    origin: str
    stop: Callable[[], None]


class Fleet:
    """Two engines and a proxy before them."""

    def __init__(self, stack: ExitStack, **settings: Any) -> None:
        self._stack = stack
        self.engines = {name: start_engine(stack) for name in NAMES}
        self.app = create_app(
            Settings(
                upstreams={name: each.origin for name, each in self.engines.items()},
                log_level="error",
                **{"handshake_interval_s": 0.2, "handshake_retry_s": 0.1, **settings},
            )
        )
        origin = stack.enter_context(serving(self.app))
        self.client = stack.enter_context(httpx.Client(base_url=origin, timeout=60))
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    def drain(self, name: str, draining: bool = True) -> None:
        self.app.state.services.pool.get(name).draining = draining

    def restart(self, name: str) -> None:
        """Drain an engine, and put a new one in its place when nothing runs there any more."""
        replica = self.app.state.services.pool.get(name)
        self.drain(name)
        self.eventually(lambda: replica.running == 0)
        self.engines[name].stop()
        self.engines[name] = start_engine(
            self._stack, int(self.engines[name].origin.rpartition(":")[2])
        )
        self.drain(name, False)

    def request(self, messages: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
        body = {"model": self.model, "messages": messages, "max_tokens": 2, "temperature": 0}
        return {**body, "ignore_eos": True, **members}

    def ask(self, session: str, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """The account of a turn."""
        answer = self.client.post(
            CHAT,
            json=self.request(messages, leyline=options),
            headers={"x-leyline-session": session},
        )
        assert answer.status_code == 200, answer.text
        account: dict[str, Any] = answer.json()["leyline"]
        return account

    def metric(self, name: str, *labels: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(name) and all(label in line for label in labels)
        )

    def eventually(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it never came to be"
            time.sleep(0.05)


def start_engine(stack: ExitStack, port: int = 0) -> Engine:
    app = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 32_768})
    own = ExitStack()
    origin = own.enter_context(serving(app, port))
    stack.callback(own.close)
    stack.callback(check_clean, app)
    learn_words(app, origin)
    return Engine(app, origin, own.close)


@contextmanager
def fleet(**settings: Any) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack, **settings)


@pytest.fixture(scope="module")
def both() -> Iterator[Fleet]:
    """Two engines that stay up."""
    with fleet() as found:
        yield found


def session_of(name: str, tag: str) -> str:
    """An id whose engine is ``name``."""
    keys = (f"{tag}-{number}" for number in range(1000))
    return next(key for key in keys if ranked(key, dict.fromkeys(NAMES, 1.0))[0] == name)


def history(count: int, task: str) -> list[dict[str, Any]]:
    """An agent's history; the first tool result holds the secret."""
    return agent_history(count, task, secret=SECRET)


def test_sessions_are_spread_and_each_stays_where_its_kv_is(both: Fleet) -> None:
    """A session's second turn finds the KV of its first, on whichever engine that is."""
    for name in NAMES:
        session = session_of(name, "stay")
        both.ask(session, history(2, session))
        account = both.ask(session, history(3, session), policy=TRUNCATE)
        assert account["outcome"] == "spliced", account
        assert holds_text(both.engines[name].app, session, session)
        other = next(each for each in NAMES if each != name)
        assert not holds_text(both.engines[other].app, session, session)


def test_a_session_whose_engine_dies_goes_on_at_the_other() -> None:
    """Before anyone has noticed, a request is served by the engine that is left, as an ordinary
    prefill that says why; from then on edits are spliced there."""
    with fleet(handshake_interval_s=60.0, handshake_retry_s=60.0) as found:
        session = session_of("a", "dies")
        found.ask(session, history(2, "Look."))
        assert found.ask(session, history(3, "Look."), policy=TRUNCATE)["outcome"] == "spliced"
        found.engines["a"].stop()
        account = found.ask(session, history(4, "Look."), policy=TRUNCATE)
        assert account["outcome"] == "reprefilled"
        assert account["reason"] == "missing_source"
        assert found.metric("leyline_failovers_total", 'upstream="a"') == 1
        gone = found.app.state.services.pool.get("a")
        found.eventually(lambda: not gone.status.up)
        account = found.ask(session, history(5, "Look."), policy=SHORTER)
        assert account["outcome"] == "spliced"
        assert found.metric("leyline_failovers_total") == 1, "by then it is known"
        ready = found.client.get("/readyz")
        assert ready.status_code == 200
        assert {each["name"]: each["up"] for each in ready.json()["upstreams"]} == {
            "a": False,
            "b": True,
        }


def test_a_stream_goes_on_at_the_other_engine_before_its_first_byte() -> None:
    """A streamed request finds its engine dead: the client sees one whole stream."""
    with fleet(handshake_interval_s=60.0, handshake_retry_s=60.0) as found:
        session = session_of("b", "stream")
        found.engines["b"].stop()
        answer = found.client.post(
            CHAT,
            json=found.request(history(1, "Look."), stream=True),
            headers={"x-leyline-session": session},
        )
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        assert answer.text.count("[DONE]") == 1
        sessions = found.client.get("/v1/leyline/sessions").json()["sessions"]
        assert [each["id"] for each in sessions] == [session]


def test_without_failover_the_failure_is_the_callers() -> None:
    """If it is switched off, a request whose engine is gone is answered with 502."""
    with fleet(handshake_interval_s=60.0, handshake_retry_s=60.0, failover=False) as found:
        session = session_of("a", "none")
        found.engines["a"].stop()
        answer = found.client.post(
            CHAT,
            json=found.request(history(1, "Look.")),
            headers={"x-leyline-session": session},
        )
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "upstream_unreachable"


def test_a_forget_reaches_the_engine_that_a_session_has_left(both: Fleet) -> None:
    """The secret was read on one engine and redacted on the other: neither holds it afterwards."""
    session = session_of("a", "left")
    left, there = both.engines["a"].app, both.engines["b"].app
    both.ask(session, history(2, "Left."))
    both.ask(session, history(3, "Left."), policy=TRUNCATE)
    assert holds_text(left, session, SECRET)
    both.drain("a")
    try:
        both.ask(session, history(4, "Left."))
        assert holds_text(there, session, SECRET)
        account = both.ask(session, history(5, "Left."), policy=REDACT)
        assert account["forgets_owed"] == 1
        assert not holds_text(there, session, SECRET)
        both.eventually(lambda: not holds_text(left, session, SECRET))
        both.eventually(
            lambda: "forgets_owed" not in both.ask(session, history(6, "Left."), policy=REDACT)
        )
        assert both.metric("leyline_erasures_total", 'result="erased"') >= 1
    finally:
        both.drain("a", False)


def test_a_proxy_that_never_saw_a_session_makes_every_engine_forget_it(both: Fleet) -> None:
    """Another proxy may have had it anywhere, so a demand reaches all engines."""
    session = session_of("a", "unseen")
    both.drain("a")
    both.ask(session, history(2, "Unseen."))
    both.drain("a", False)
    there = both.engines["b"].app
    assert holds_text(there, session, SECRET)
    origins = {name: each.origin for name, each in both.engines.items()}
    with (
        serving(create_app(Settings(upstreams=origins, log_level="error"))) as origin,
        httpx.Client(base_url=origin, timeout=60) as client,
    ):
        answer = client.post(
            CHAT,
            json=both.request(history(3, "Unseen."), leyline={"policy": REDACT}),
            headers={"x-leyline-session": session},
        )
        assert answer.status_code == 200, answer.text
        both.eventually(lambda: not holds_text(there, session, SECRET))


def test_claims_are_kept_by_the_engine_that_has_the_kv(both: Fleet) -> None:
    """Claims of two sessions live on two engines; the caller sees, changes and ends both alike."""
    ids = {}
    for name in NAMES:
        session = session_of(name, "claims")
        both.ask(session, history(2, session))
        answer = both.client.post(
            "/v1/leyline/claims",
            json={"session": session, "kind": "soft", "predicate": {"messages": [0, 1]}},
        )
        assert answer.status_code == 201, answer.text
        ids[answer.json()["id"]] = name
    listed = both.client.get("/v1/leyline/claims").json()["claims"]
    assert {each["id"] for each in listed} == ids.keys()
    assert both.metric("leyline_claims{", 'kind="soft"') in (0.0, 1.0, 2.0)
    both.eventually(lambda: both.metric("leyline_claims{", 'kind="soft"') == 2)
    for claim in ids:
        assert both.client.get(f"/v1/leyline/claims/{claim}").json()["id"] == claim
        assert both.client.delete(f"/v1/leyline/claims/{claim}").json()["state"] == "released"
    assert both.client.get("/v1/leyline/claims/c-none").status_code == 404


def test_engines_restarted_one_by_one_lose_no_request_and_change_no_answer() -> None:
    """While each engine in turn is drained, replaced and taken back, every request of every
    session is answered, and as an engine alone answers it."""
    sessions = [f"roll-{number}" for number in range(6)]
    with fleet() as found:
        wanted: dict[tuple[str, int], str] = {}
        got: dict[tuple[str, int], tuple[int, str]] = {}

        def text(answer: httpx.Response) -> str:
            return str(answer.json()["choices"][0]["message"]["content"])

        alone = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 32_768})
        with serving(alone) as origin, httpx.Client(base_url=origin, timeout=60) as client:
            for session in sessions:
                for turn in range(1, 7):
                    body = found.request(history(turn, session))
                    wanted[session, turn] = text(client.post(CHAT, json=body))
        check_clean(alone)

        def talk(session: str) -> None:
            with httpx.Client(base_url=found.client.base_url, timeout=60) as client:
                for turn in range(1, 7):
                    answer = client.post(CHAT, json=found.request(history(turn, session)))
                    ok = answer.status_code == 200
                    got[session, turn] = answer.status_code, text(answer) if ok else answer.text
                    time.sleep(0.1)

        threads = [threading.Thread(target=talk, args=(session,)) for session in sessions]
        for thread in threads:
            thread.start()
        for name in NAMES:
            found.restart(name)
            up = found.app.state.services.pool.get(name)
            found.eventually(lambda up=up: up.ready)
        for thread in threads:
            thread.join()
        assert got == {key: (200, value) for key, value in wanted.items()}
