"""The header by which a router after the proxy keeps a session with its worker."""

from __future__ import annotations

from support.fake_engine import MODEL, FakeEngine, proxy_before

CHAT = "/v1/chat/completions"
REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}


async def test_the_affinity_header_is_the_proxys_alone() -> None:
    """A client that sends it itself chooses no worker of the router."""
    engine = FakeEngine()
    async with proxy_before(engine, affinity_header="X-Route", log_level="error") as client:
        for path, body in ((CHAT, REQUEST), ("/v1/completions", {"model": MODEL, "prompt": "a"})):
            await client.post(
                path, json=body, headers={"x-route": "forged", "x-leyline-session": "mine"}
            )
    sent = [[v for name, v in raw if name == b"x-route"] for raw in engine.raw_headers]
    assert sent == [[b"mine"], []]
