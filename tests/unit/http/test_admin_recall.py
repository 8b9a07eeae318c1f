"""Deletion of a session whose evicted texts are looked for in what the model writes."""

from __future__ import annotations

import httpx
import pytest
from support.fake_engine import LONG, MODEL, FakeEngine, chat_json
from support.metrics_page import metric
from support.waiting import until
from test_admin_api import ADMIN_KEY, CHAT, both

RECALL = {"recall": "on", "policy": "truncate_older_than:n=1,max_chars=80,recallable=true"}
QUOTED = LONG[200:600]


async def turn(proxy: httpx.AsyncClient, *more: dict[str, str], session: str = "s") -> None:
    """A turn whose history has a long result, which the policy evicts, and a short one."""
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
        for n in range(2)
    ]
    messages = [
        {"role": "user", "content": f"List, {session}."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": f"{session}: {LONG}"},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        *more,
    ]
    body = {"model": MODEL, "messages": messages}
    answer = await proxy.post(CHAT, json=body, headers={"x-leyline-session": session})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("deletes", [True, False])
async def test_a_deleted_session_is_not_looked_at(deletes: bool) -> None:
    """Nothing of a session that was deleted is looked for; of one that wasn't, it is, also if the
    engine retains no turn."""
    engine = FakeEngine(capability=None)
    engine.answers = [chat_json(QUOTED) for _ in range(3)]
    said = ({"role": "assistant", "content": QUOTED}, {"role": "user", "content": "Go on."})
    async with both(engine, **RECALL) as (proxy, operator):
        operator.headers["authorization"] = f"Bearer {ADMIN_KEY}"

        async def evicted() -> float:
            return await metric(operator, "leyline_evicted_tokens_total")

        await turn(proxy)
        await until(evicted)
        if deletes:
            gone = await operator.delete("/admin/sessions/default/s")
            assert gone.status_code == 200, gone.text
        await turn(proxy, *said)
        before = await evicted()
        await turn(proxy, session="later")

        async def is_later_counted() -> bool:
            return await evicted() > before

        await until(is_later_counted)
        assert bool(await metric(operator, "leyline_evicted_quoted_tokens_total")) is not deletes
