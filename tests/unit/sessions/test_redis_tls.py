"""Redis over TLS: the server must prove its identity."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.certificates import Authority
from support.redis_server import RedisServer, free_port, redis_server
from support.sessions import blank

from leyline_proxy.settings import Settings
from leyline_proxy.wiring.stores import build_stores

SECRET = "a secret of sixteen characters or more"


@pytest.fixture
def tls_port(tmp_path: Path) -> Iterator[tuple[int, RedisServer]]:
    """A server with a port for TLS, and its authority's certificate as ``own.pem``."""
    pair = Authority(tmp_path, "own").issue("127.0.0.1")
    port = free_port()
    options = (
        *("--tls-port", str(port), "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(pair.cert), "--tls-key-file", str(pair.key)),
    )
    with redis_server(tmp_path, *options) as server:
        yield port, server


async def test_sessions_go_through_tls(tls_port: tuple[int, RedisServer], tmp_path: Path) -> None:
    """With the authority's certificate the store works; with another's it is out of reach."""
    port, _ = tls_port
    settings = Settings(
        session_store=f"rediss://127.0.0.1:{port}/0",
        session_secret=[SECRET],
        redis_ca_file=tmp_path / "own.pem",
        redis_connect_timeout_s=2.0,
        redis_timeout_s=2.0,
    )
    store = build_stores(settings)[0]
    await store.connect()
    assert store.problem is None
    written = await store.update("t", "a", lambda _: blank("a"))
    assert await store.get("t", "a") == written
    await store.aclose()
    for file in (Authority(tmp_path, "another").ca, None):
        stranger = build_stores(settings.model_copy(update={"redis_ca_file": file}))[0]
        await stranger.connect()
        assert stranger.problem is not None
        await stranger.aclose()


async def test_a_password_is_given_and_not_told(tmp_path: Path) -> None:
    """The password in the URL opens Redis; a wrong one is a problem that quotes neither."""
    with redis_server(tmp_path, "--requirepass", "right-word") as server:
        for word, works in (("right-word", True), ("wrong-word", False)):
            settings = Settings(
                session_store=f"redis://:{word}@127.0.0.1:{server.port}/0", session_secret=[SECRET]
            )
            assert word not in repr(settings)
            store = build_stores(settings)[0]
            await store.connect()
            assert (store.problem is None) == works
            assert word not in str(store.problem)
            await store.aclose()
