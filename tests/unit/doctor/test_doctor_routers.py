"""The check of routers: requests to engines need them, the handshake doesn't."""

from __future__ import annotations

from typing import Any

from support.fake_engine import FakeEngine

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.doctor.checks import Situation, checks_for
from leyline_proxy.doctor.engines import examine_router
from leyline_proxy.doctor.findings import Status
from leyline_proxy.settings import Settings


def settings(router: str) -> Settings:
    """Settings of two engines, one of which has another router."""
    engines: dict[str, Any] = {
        "a": {"url": "http://127.0.0.1:1"},
        "b": {"url": "http://127.0.0.1:1", "router": "http://user:secret@127.0.0.1:1"},
    }
    return Settings(upstreams=engines, router=router)


async def test_a_router_is_asked_itself() -> None:
    """Any answer will do; a dead one fails, without the credentials of its URL."""
    with serving(FakeEngine()) as origin:
        given = settings(origin)
        (alive,) = await examine_router(given, "a", 5.0)
        (dead,) = await examine_router(given, "b", 5.0)
    assert (alive.name, alive.status) == ("upstream.a.router", Status.OK)
    assert (dead.name, dead.status) == ("upstream.b.router", Status.FAIL)
    assert "http://127.0.0.1:1: nothing is listening there" in dead.detail
    assert "the router" in dead.fix and "secret" not in f"{dead}"


def test_each_engine_behind_a_router_has_the_check() -> None:
    """Without a router there is none."""
    checks = checks_for(Situation(settings("http://127.0.0.1:2")))
    assert {"upstream.a.router", "upstream.b.router"} <= checks.keys()
    plain = checks_for(Situation(Settings(upstream="http://127.0.0.1:1")))
    assert not [name for name in plain if name.endswith(".router")]
