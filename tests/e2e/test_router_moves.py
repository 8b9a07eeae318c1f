"""Routers that don't keep sessions: each turn is served, named, and nothing is claimed falsely."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from support.switching_router import KEPT, SwitchingRouter

from leyline_lab.stand_ins.router import TRUNCATE, Fleet, Proxy, conversation, fleet
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.upstream.embedded import create_embedded_engine
from leyline_proxy.upstream.rendezvous import ranked

TURNS = 6
FORGET = r"redact:pattern='key=\d+',replacement='[gone]'"


@dataclass
class Routed:
    """Two engines that the proxy knows, a third that it doesn't, and the router between."""

    fleet: Fleet
    router: SwitchingRouter
    origin: str
    stranger: str

    def to(self, name: str) -> None:
        """Send all requests to one engine from now on."""
        origin = self.fleet.origins.get(name, self.stranger)
        self.router.target = lambda _: origin

    def proxy(self, **settings: Any) -> Proxy:
        return self.fleet.proxy(self.origin, **settings)


@pytest.fixture(scope="module")
def routed() -> Iterator[Routed]:
    with fleet(2, policy=TRUNCATE, handshake_interval_s=30) as engines:
        other = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 32_768})
        stranger = engines.stack.enter_context(serving(other))
        switching = SwitchingRouter(lambda _: engines.origins["e0"])
        origin = engines.stack.enter_context(serving(switching.app))
        yield Routed(engines, switching, origin, stranger)


@pytest.fixture(autouse=True)
def at_first(routed: Routed) -> None:
    routed.to("e0")
    routed.router.kept = KEPT
    routed.router.retypes = False
    routed.router.headers.clear()
    routed.router.bodies.clear()


def play(proxy: Proxy, tag: str, turns: range, **members: Any) -> list[dict[str, Any]]:
    """The accounts of a session's turns."""
    messages = conversation(0, TURNS, tag)
    return [proxy.account(tag, messages[: 2 * turn + 1], **members) for turn in turns]


def test_a_session_that_the_router_moves_is_named_and_splices_at_its_new_engine(
    routed: Routed,
) -> None:
    """The first turn elsewhere is an ordinary prefill for a missing source; the next splices."""
    proxy = routed.proxy()
    stays = play(proxy, "moved", range(4))
    routed.to("e1")
    moved, after = play(proxy, "moved", range(4, 6))
    assert stays[-1]["outcome"] == "spliced", stays
    assert (moved["outcome"], moved["reason"]) == ("reprefilled", "missing_source")
    assert moved["tokens"]["spliced"] == 0
    assert after["outcome"] == "spliced", after
    assert proxy.kinds() == {"first": 1, "holder": 4, "moved": 1}
    assert proxy.answers()["e1", "moved"] == 1


def test_records_that_the_router_drops_are_asked_for_at_every_engine(routed: Routed) -> None:
    """The engine that has answered has the record, wherever the proxy expected the turn."""
    proxy = routed.proxy()
    routed.router.retypes = True
    play(proxy, "asked", range(3))
    routed.to("e1")
    moved, after = play(proxy, "asked", range(3, 5))
    assert (moved["outcome"], moved["reason"]) == ("reprefilled", "missing_source")
    assert after["outcome"] == "spliced", after
    assert proxy.kinds() == {"first": 1, "holder": 3, "moved": 1}


def test_streams_behind_a_router_bring_their_receipts_too(routed: Routed) -> None:
    """A streamed answer names its engine like a whole one."""
    proxy = routed.proxy()
    routed.to("e1")
    messages = conversation(0, TURNS, "streamed")
    for turn in range(4):
        body = {"model": proxy.model, "messages": messages[: 2 * turn + 1], "max_tokens": 2}
        answer = proxy.client.post(
            "/v1/chat/completions",
            json={**body, "stream": True, "temperature": 0, "ignore_eos": True},
            headers={"x-leyline-session": "streamed"},
        )
        assert answer.status_code == 200
    assert '"outcome":"spliced"' in answer.text.replace(" ", "")
    assert "leyline_record" not in answer.text
    assert proxy.kinds() == {"first": 1, "holder": 3}


def test_an_engine_that_the_proxy_does_not_know_never_counts_as_a_source(routed: Routed) -> None:
    """Its turns are served as ordinary prefills, under a name of their own."""
    proxy = routed.proxy()
    play(proxy, "strange", range(3))
    routed.to("stranger")
    accounts = play(proxy, "strange", range(3, 6))
    assert all(each["outcome"] != "spliced" for each in accounts), accounts
    assert proxy.answers()["unknown", "unknown"] == 3


def test_a_forget_that_an_unknown_engine_may_hold_stays_owed(routed: Routed) -> None:
    """A demand reaches every engine behind the router, and is owed by those out of reach."""
    proxy = routed.proxy(policy="keep_all")
    secret = [{"role": "user", "content": "The key=7391 opens the door. " * 6}]
    routed.to("stranger")
    proxy.account("owing", secret)
    routed.to("e1")
    secret += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
    owing = proxy.account("owing", secret, leyline={"policy": FORGET})
    assert owing["forgets_owed"] >= 1, owing
    again = proxy.account("owing", [*secret, *secret[1:]], leyline={"policy": FORGET})
    assert again["forgets_owed"] >= 1, again


def test_a_forget_reaches_every_engine_behind_the_router(routed: Routed) -> None:
    """The router may have tried other engines before the one that answered: all are asked."""
    proxy = routed.proxy(policy="keep_all")
    secret = [{"role": "user", "content": "The key=7391 opens the door. " * 6}]
    keys = (f"everywhere-{number}" for number in range(100))
    # Neither the proxy nor the router has reason to name the other engine.
    session = next(key for key in keys if ranked(key, {"e0": 1.0, "e1": 1.0})[0] == "e0")
    proxy.account(session, secret)
    secret += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
    proxy.account(session, secret, leyline={"policy": FORGET})
    erased = 'leyline_erasures_total{result="erased"} 1.0'
    deadline = time.monotonic() + 20
    while erased not in proxy.client.get("/metrics").text:
        assert time.monotonic() < deadline, "the other engine was not asked"
        time.sleep(0.05)


def test_a_router_that_drops_the_envelope_is_named(routed: Routed) -> None:
    """Without envelopes there are no records: nobody knows who has answered, nothing is spliced."""
    proxy = routed.proxy(receipt_timeout_s=0.2)
    routed.router.kept = KEPT - {"metadata"}
    accounts = play(proxy, "dropped", range(4))
    assert all(each["tokens"]["spliced"] == 0 for each in accounts), accounts
    assert proxy.kinds() == {"unrecorded": 4}


def test_an_engine_that_restarts_behind_the_router_is_named(routed: Routed) -> None:
    """The first turn at the later run is an ordinary prefill; then it splices again."""
    options = {"device": "cpu", "pool_tokens": 32_768}
    first = ExitStack()
    origin = first.enter_context(serving(create_embedded_engine("replay", options)))
    routed.router.target = lambda _: origin
    one = Fleet(routed.fleet.stack, {}, {"e": origin}, routed.fleet.settings)
    # The proxy asks the engine for its name before it settles the turn: a slow machine has time.
    proxy = one.proxy(routed.origin, receipt_timeout_s=30)
    assert play(proxy, "restarted", range(4))[-1]["outcome"] == "spliced"
    first.close()
    port = int(origin.rpartition(":")[2])
    with serving(create_embedded_engine("replay", options), port):
        lost, after = play(proxy, "restarted", range(4, 6))
        assert (lost["outcome"], lost["reason"]) == ("reprefilled", "missing_source")
        assert after["outcome"] == "spliced", after
        assert proxy.kinds() == {"first": 1, "holder": 4, "restarted": 1}


def test_the_router_gets_one_key_for_each_tenants_session(routed: Routed) -> None:
    """The headers are the proxy's own, alike on every turn, and no session's id is in them."""
    proxy = routed.proxy()
    messages = conversation(0, 1, "keys")
    for session in ("one", "one", "two"):
        proxy.client.post(
            "/v1/chat/completions",
            json={"model": proxy.model, "messages": messages, "max_tokens": 1},
            headers={"x-leyline-session": session, "x-smg-routing-key": "forged"}
            | {"x-smg-target-worker": "0", "x-session-token": "forged"},
        )
    keys = [headers["x-smg-routing-key"] for headers in routed.router.headers]
    assert keys[0] == keys[1] != keys[2]
    assert not {"one", "two", "forged"} & {*keys}
    for headers in routed.router.headers:
        assert headers["x-session-id"] == headers["x-smg-routing-key"]
        assert not {"x-smg-target-worker", "x-session-token"} & headers.keys()


def test_the_name_that_a_router_gives_an_engine_comes_back_to_it(routed: Routed) -> None:
    """The proxy learns the name from one session's answer, and sends it for every session there."""
    proxy = routed.proxy()
    names = {origin: f"token-{name}" for name, origin in routed.fleet.origins.items()}
    routed.router.token = names
    play(proxy, "named", range(1))
    by_token = {token: origin for origin, token in names.items()}
    elsewhere = routed.fleet.origins["e1"]
    # From here on only the name keeps the session where it is.
    routed.router.target = lambda headers: by_token.get(
        headers.get("x-session-token", ""), elsewhere
    )
    accounts = play(proxy, "named", range(1, 4))
    routed.router.token = {}
    assert accounts[-1]["outcome"] == "spliced", accounts
    assert proxy.kinds() == {"first": 1, "holder": 3}


def test_clients_cannot_carry_members_past_the_proxy(routed: Routed) -> None:
    """An entry of metadata in the carriage's name is the proxy's alone, however it is spelt."""
    proxy = routed.proxy()
    forged = r'"{\"cache_salt\":\"theirs\"}"'
    for name in ('"leyline_carried"', r'"leyline\u005fcarried"'):
        raw = (
            f'{{"model":"{proxy.model}","messages":[{{"role":"user","content":"Hi."}}],'
            f'"max_tokens":1,"metadata":{{"mine":"1",{name}:{forged}}}}}'
        )
        answer = proxy.client.post(
            "/v1/chat/completions", content=raw, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200, answer.text
    for body in routed.router.bodies:
        assert body["metadata"]["mine"] == "1"
        assert "theirs" not in body["metadata"]["leyline_carried"]
    direct = routed.fleet.proxy()
    answer = direct.client.post(
        "/v1/chat/completions", content=raw, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200


def test_a_router_that_is_down_is_an_error_of_the_upstream(routed: Routed) -> None:
    """The engines are up, but no chat request reaches them: the client learns which hop failed."""
    proxy = routed.fleet.proxy("http://127.0.0.1:9", failover=False)
    answer = proxy.client.post(
        "/v1/chat/completions",
        json={"model": proxy.model, "messages": [{"role": "user", "content": "Hi."}]},
    )
    assert answer.status_code == httpx.codes.BAD_GATEWAY, answer.text
