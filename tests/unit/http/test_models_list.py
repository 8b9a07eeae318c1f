"""The list of models, which is put together from the engines' own."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_engine import MODEL, FakeEngine
from support.replicas import replica_over

from leyline_proxy.errors import ProxyError
from leyline_proxy.http.models import model_list
from leyline_proxy.upstream.pool import ReplicaPool


async def test_a_list_of_models_doesnt_wait_for_an_engine_that_hangs() -> None:
    """An engine that is known to be down isn't asked while another is up."""
    refuses = True

    async def down(scope: object, receive: object, send: object) -> None:
        if refuses:
            raise ConnectionError("scripted")
        await asyncio.Event().wait()

    pool = ReplicaPool([replica_over(down, "a"), replica_over(FakeEngine(), "b")])
    await pool.refresh()
    refuses = False
    async with asyncio.timeout(5):
        answer = await model_list(pool, None, ())
    assert MODEL.encode() in bytes(answer.body)
    with pytest.raises(ProxyError) as refused:
        await model_list(pool, frozenset(), ())
    assert refused.value.code == "no_upstream"
    await pool.aclose()
