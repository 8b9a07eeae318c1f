"""A forget with a proof, over a proxy and a real SGLang server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.agent_history import agent_history
from support.sglang_stack import MODEL, SglangServer, StartProxy


def turn(proxy: str, session: str, count: int) -> None:
    answer = httpx.post(
        f"{proxy}/v1/chat/completions",
        json={
            "model": MODEL,
            "messages": agent_history(count, session[:1], secret="key=7391"),
            "max_tokens": 4,
        },
        headers={"x-leyline-session": session},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.nightly
def test_a_session_is_forgotten_and_that_is_proven(
    engine: SglangServer, start_proxy: StartProxy
) -> None:
    """Its rows are digested and found nowhere; those of a session with the same text are kept."""
    proxy = start_proxy(engine.base_url)
    for count in (2, 3):
        turn(proxy, "a1", count)
    turn(proxy, "a2", 2)
    found: dict[str, Any] = httpx.post(
        f"{proxy}/v1/leyline/sessions/a1/proof", json={"wait_s": 30}, timeout=120
    ).json()
    assert found["verdict"] == "clean", found
    (asked,) = found["engines"]
    assert asked["doomed"] == asked["digested"] > 200
    kept = {place["place"]: place["kept"] for place in asked["places"]}
    assert kept["pool.tree"] > 100
