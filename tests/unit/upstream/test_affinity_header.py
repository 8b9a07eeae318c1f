"""The header by which a router after the proxy keeps a session with its worker."""

from __future__ import annotations

from support.fake_engine import MODEL, FakeEngine, proxy_before

from leyline_proxy.upstream.affinity import MAX_TOKEN, routing_key, tokens_in

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


def test_sessions_of_one_name_have_a_key_for_each_tenant() -> None:
    """A router sees neither that tenants use the same name, nor whose session a key is."""
    keys = {routing_key(tenant, session) for tenant in ("red", "blue") for session in ("a", "b")}
    assert len(keys) == 4
    assert not any(name in key for key in keys for name in ("red", "blue"))


def test_names_of_engines_are_kept_up_to_a_length() -> None:
    """A router whose header is longer is followed by its other headers alone."""
    for length, kept in ((0, 0), (1, 1), (MAX_TOKEN, 1), (MAX_TOKEN + 1, 0)):
        assert len(tokens_in({"x-session-token": "t" * length})) == kept
