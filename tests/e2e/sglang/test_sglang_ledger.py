"""A session's ledger over a proxy and a real SGLang server, which answers with its own readers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.agent_history import agent_history
from support.sglang_stack import MODEL, SglangServer, StartProxy

RESULT = 3
"""Index of the result that is shortened."""


def turn(proxy: str, messages: list[dict[str, Any]], leyline: dict[str, Any]) -> dict[str, Any]:
    """The account of a turn of the session."""
    answer = httpx.post(
        f"{proxy}/v1/chat/completions",
        json={"model": MODEL, "messages": messages, "max_tokens": 4, "leyline": leyline},
        headers={"x-leyline-session": "a1"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["leyline"]
    return found


def ledger(proxy: str) -> dict[str, Any]:
    """The session's ledger."""
    answer = httpx.get(f"{proxy}/v1/leyline/sessions/a1/ledger", timeout=60)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


@pytest.mark.nightly
def test_sglang_answers_for_its_own_ledger(engine: SglangServer, start_proxy: StartProxy) -> None:
    """A shortened message is shown by the turns before the edit and read by the splice's lineage;
    after a forget of everything, the engine has nothing to answer."""
    proxy = start_proxy(engine.base_url)
    turn(proxy, agent_history(2, "a", secret="key=7391"), {})
    shorter = {"policy": "truncate_older_than:n=2,max_chars=20"}
    account = turn(proxy, agent_history(3, "a", secret="key=7391"), shorter)
    assert account["tokens"]["spliced"] > 0, account
    found = ledger(proxy)
    (asked,) = found["engines"]
    assert (asked["answer"], asked["pending"], asked["owed"]) == ("given", 0, False)
    (edited,) = (each for each in found["spans"] if each["message"] == RESULT)
    assert edited["state"] == "edited", edited
    (readers,) = edited["engines"]
    assert readers["turns"] >= 1 and readers["lineages"] >= 1
    firsts = [each["from"] for each in edited["read_by"]]
    assert readers["from"] == min(firsts)
    system = next(each for each in found["spans"] if each["message"] == 0)
    assert system["engines"][0]["turns"] >= 2
    assert (system["engines"][0]["lineages"], system["engines"][0]["from"]) == (0, 0)
    proof = httpx.post(f"{proxy}/v1/leyline/sessions/a1/proof", json={}, timeout=120).json()
    assert proof["verdict"] == "clean", proof
    assert ledger(proxy)["engines"] == []
