"""Questions of policies beside the client's requests: who may ask, where, and in which order."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from starlette.requests import Request
from starlette.types import Receive, Send
from support.fake_engine import MODEL, Answer, FakeEngine, proxy_before, tool_session
from support.waiting import until

from leyline_policies.builtin.summarize import TASK

CHAT = "/v1/chat/completions"
POLICY = "summarize:trigger_tokens=500,keep_messages=2"
SETTINGS: dict[str, Any] = {"policy": POLICY, "edit_timing": "now", "log_level": "error"}


class Patient(FakeEngine):
    """An engine that answers questions of policies as told."""

    def __init__(self, answer: Answer | None) -> None:
        super().__init__()
        self.answer = answer
        self.questions: list[dict[str, str]] = []
        """Headers of those that came."""

    async def complete(self, request: Request, receive: Receive, send: Send) -> None:
        """Answer a question as told, and everything else at once."""
        if TASK.encode() in await request.body():
            self.questions.append(dict(request.headers))
            self.answers = [self.answer] if self.answer is not None else []
        await super().complete(request, receive, send)


async def ask(
    client: httpx.AsyncClient, messages: list[dict[str, Any]], **headers: str
) -> dict[str, Any]:
    """A turn's account."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await client.post(CHAT, json=body, headers=given)
    assert answer.status_code == 200, answer.text
    account: dict[str, Any] = answer.json()["leyline"]
    return account


async def written(client: httpx.AsyncClient) -> None:
    """Wait for the answer to a question."""
    line = 'leyline_policy_completions_total{result="written"} 1.0'
    for _ in range(500):
        if line in (await client.get("/metrics")).text:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(line)


async def test_a_tenants_questions_leave_room_for_others() -> None:
    """Of eight at once, a tenant alone has four, and another one still gets its own."""
    engine = Patient(Answer(hangs=True))
    keys = ("red:red-key-0123456789abcdef", "blue:blue-key-0123456789abcdef")
    async with proxy_before(engine, api_keys=keys, **SETTINGS) as client:
        for name, most in (("red", 4), ("blue", 6)):
            for number in range(7):
                session = {"x_leyline_session": f"{name}-{number}"}
                key = f"Bearer {name}-key-0123456789abcdef"
                await ask(client, tool_session(3), authorization=key, **session)
            await until(lambda most=most: len(engine.questions) == most)


async def test_a_router_gets_a_question_where_its_session_is() -> None:
    """The header that keeps a session at its worker goes with it."""
    engine = Patient(None)
    async with proxy_before(engine, affinity_header="X-Route", **SETTINGS) as client:
        await ask(client, tool_session(3), x_leyline_session="routed")
        await until(lambda: len(engine.questions) == 1)
    assert engine.questions[0]["x-route"] == "routed"


async def test_the_client_goes_on_while_a_question_runs() -> None:
    """The session is then found by its newest list, not by that of the question."""
    engine = Patient(Answer([b'{"choices": [{"message": {"content": "Sum."}}]}'], pause_s=0.5))
    async with proxy_before(engine, **SETTINGS) as client:
        session = (await ask(client, tool_session(3)))["session"]
        await until(lambda: len(engine.questions) == 1)
        assert (await ask(client, tool_session(4)))["session"] == session
        await written(client)
        # Another conversation from the question's list on isn't that of the newest.
        other = [*tool_session(3), {"role": "assistant", "content": "Done."}]
        fork = await ask(client, [*other, {"role": "user", "content": "Thanks. And now?"}])
        assert fork["session"] != session
        assert (await ask(client, tool_session(5)))["session"] == session
