"""Forgetting over HTTP: the receipt stays open until the last slot is overwritten."""

from __future__ import annotations

from typing import Any

import httpx
from starlette.applications import Starlette
from support.engine_http import MESSAGES, hints, is_idle, record_of, served
from support.waiting import until

from leyline_lab.stand_ins.serving import check_clean

SECRET = [*MESSAGES[:1], {"role": "user", "content": "The key is 4711. " * 20}]
REDACTED = [*MESSAGES[:1], {"role": "user", "content": "The key is [REDACTED]."}]


async def send(client: httpx.AsyncClient, message_id: str, messages: list[Any], **more: Any) -> int:
    """One short chat turn of session s; its prompt's length."""
    length = (await client.post("/tokenize", json={"messages": messages})).json()["count"]
    label = {"span": message_id, "start": 0, "end": length}
    body = {"messages": messages, "max_tokens": 2, "temperature": 0}
    params = hints(message_id, turn=message_id, spans=(label,), **more)
    answer = await client.post("/v1/chat/completions", json=body | {"custom_params": params})
    assert answer.status_code == 200, answer.text
    return int(length)


async def test_a_receipt_is_closed_when_the_last_holder_ends(app: Starlette) -> None:
    """A stream of the same session holds the slots; they are pending until it is over."""
    async with served(app) as client:
        length = await send(client, "first", SECRET)
        body = {"messages": SECRET, "max_tokens": 5000, "ignore_eos": True, "stream": True}
        label = {"span": "first", "start": 0, "end": length}
        body["custom_params"] = hints("holder", turn="holder", spans=(label,))
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await send(client, "redaction", REDACTED, forget=("first",))
            forgot = (await record_of(app, "redaction"))["receipt"]["forgot"]
            # The system message is common to both prompts and stays.
            assert forgot["pending"] > 0.5 * length
            assert forgot["shared_retained"] == 0
        await until(lambda: is_idle(app))
    closed = (await record_of(app, "redaction"))["receipt"]["forgot"]
    assert closed["pending"] == 0
    assert closed["overwritten"] == forgot["overwritten"] + forgot["pending"]
    check_clean(app)
