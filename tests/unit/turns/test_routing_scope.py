"""A tenant's cache scope behind a router, which may drop the salt that keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import msgspec
from support.fake_engine import CAPABILITY, MODEL, FakeEngine
from support.redis_server import free_port
from support.switching_router import SwitchingRouter

from leyline_engine.contract import CARRIED, with_carriage
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

ISOLATES = msgspec.structs.replace(CAPABILITY, isolates=True)
REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}


@contextmanager
def routed(
    *engines: FakeEngine, away: str | None = None
) -> Iterator[tuple[httpx.Client, SwitchingRouter]]:
    """A client of a proxy with cache scopes, and the router in front of the first engine.

    Args:
        away: the address of one more engine.
    """
    with serving(engines[0]) as first, serving(engines[-1]) as last:
        router = SwitchingRouter(lambda _: first)
        with serving(router.app) as between:
            settings = Settings(
                upstreams={"a": first, "b": last, **({"c": away} if away else {})},
                router=between,
                cache_scope="tenant",
                log_level="error",
            )
            with serving(create_app(settings)) as proxy, httpx.Client(base_url=proxy) as client:
                yield client, router


def test_a_scope_that_the_router_may_break_is_refused() -> None:
    """One engine that doesn't unpack the salt is enough: its KV would serve other tenants."""
    engines = FakeEngine(capability=with_carriage(ISOLATES)), FakeEngine(capability=ISOLATES)
    with routed(*engines) as (client, router):
        answers = [
            client.post(
                "/v1/chat/completions", json=REQUEST, headers={"x-leyline-session": f"s{number}"}
            )
            for number in range(8)  # of which either engine is expected to serve some
        ]
    assert {answer.status_code for answer in answers} == {httpx.codes.NOT_IMPLEMENTED}
    assert {each.json()["error"]["code"] for each in answers} == {"cache_scope_unsupported"}
    assert not router.bodies


def test_a_salt_is_carried_to_engines_that_unpack_it() -> None:
    """It isn't in the place from which the router would drop it."""
    with routed(FakeEngine(capability=with_carriage(ISOLATES))) as (client, router):
        answer = client.post("/v1/chat/completions", json=REQUEST)
    assert answer.status_code == httpx.codes.OK, answer.text
    (body,) = router.bodies
    assert "cache_salt" in body["metadata"][CARRIED]
    assert "cache_salt" not in body


def test_an_engine_that_never_answered_may_break_a_scope() -> None:
    """The router may reach an engine that the proxy doesn't, and nobody knows what that unpacks."""
    engine = FakeEngine(capability=with_carriage(ISOLATES))
    with routed(engine, away=f"http://127.0.0.1:{free_port()}") as (client, router):
        answer = client.post("/v1/chat/completions", json=REQUEST)
    assert answer.status_code == httpx.codes.NOT_IMPLEMENTED, answer.text
    assert "c may drop" in answer.json()["error"]["message"]
    assert "hasn't reached" in answer.json()["error"]["message"]
    assert not router.bodies
