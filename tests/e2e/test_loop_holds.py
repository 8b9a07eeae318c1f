"""No turn of 100,000 tokens holds the proxy's event loop for long: a real proxy before a scripted
engine with a real template and tokenizer."""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from support.fake_engine import CAPABILITY, JSON, MODEL, Answer, FakeEngine
from support.loop_holds import Hold, LoopHolds, watched_proxy
from support.redis_server import redis_server
from transformers import AutoTokenizer

from leyline_engine.contract import RENDERER_PATH, TOKENIZE_PATH
from leyline_lab.stand_ins.serving import serving
from leyline_proxy.render import ChatRenderer
from leyline_replay.models.trained import DEFAULT_MODEL_NAME, trained_model_dir
from leyline_replay.text.chat import PromptEncoder

GOAL_S = 0.05
CHARS = 420_000
SIZES = (100, 400, 1500, 6000)
FRESH = 4
"""Rounds that later turns append."""
PLAYS = 2
CHAT = "/v1/chat/completions"
Message = dict[str, Any]
FIELDS = {f"p{n}": {"type": "string", "description": "a value of the tool"} for n in range(8)}


@cache
def source() -> str:
    """Text of the kind that agents read."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "\n".join(path.read_text(errors="replace") for path in files)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Reads a file, and says so. " * 12,
            "parameters": {"type": "object", "properties": FIELDS},
        },
    }
    for number in range(40)
]


class Tokenising(FakeEngine):
    """An engine whose prompts can be rendered and tokenised in the proxy."""

    def __init__(self) -> None:
        folder = trained_model_dir(DEFAULT_MODEL_NAME)
        assert folder is not None
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        facts = {"max_context": 1 << 22, "vocab_size": len(tokenizer)}
        super().__init__(capability=msgspec.structs.replace(CAPABILITY, **facts))
        document = PromptEncoder(tokenizer).renderer_document()
        self._renderer = ChatRenderer(**document)
        self.scripted[RENDERER_PATH] = Answer([json.dumps(document).encode()])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["path"] == TOKENIZE_PATH:
            asked = json.loads(await Request(scope, receive).body())
            tokens = self._renderer.render_request(asked["messages"], asked).tokens.tolist()
            answer = Answer([json.dumps({"tokens": tokens}).encode()])
            await self.send_answer(answer, send)
            return
        await super().__call__(scope, receive, send)


def conversation(play: int) -> list[Message]:
    """Hundreds of messages with 100,000 tokens and more, of which no other play has any."""
    text, at = source(), play * 2 * CHARS
    task = [
        {"role": "system", "content": text[at : at + 8000]},
        {"role": "user", "content": f"Find the defect, number {play}."},
    ]
    end, number = at + CHARS, 0
    while at < end:
        size = SIZES[number * 7 % len(SIZES)]
        function = {"name": f"tool_{number % 40}", "arguments": json.dumps({"p0": f"{number}.py"})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        said = {"role": "assistant", "content": f"Step {play}.{number}.", "tool_calls": [call]}
        task += [
            said,
            {"role": "tool", "tool_call_id": call["id"], "content": text[at : at + size]},
        ]
        at, number = at + size, number + 1
    return task


def as_messages(messages: list[Message]) -> dict[str, Any]:
    """A chat as a request of Anthropic's API."""
    found: list[Message] = []
    for each in messages[1:]:
        if each["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": each["tool_call_id"]}
            found.append({"role": "user", "content": [{**result, "content": each["content"]}]})
            continue
        blocks: list[Message] = [{"type": "text", "text": each["content"]}]
        for call in each.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            used = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
            blocks.append({**used, "input": given})
        found.append({"role": each["role"], "content": blocks})
    tools = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"]["description"],
            "input_schema": tool["function"]["parameters"],
        }
        for tool in TOOLS
    ]
    system = messages[0]["content"]
    return {"system": system, "messages": found, "tools": tools, "max_tokens": 5}


def as_input(messages: list[Message]) -> dict[str, Any]:
    """A chat as a request of the Responses API."""
    found: list[Message] = []
    for each in messages[1:]:
        if each["role"] == "tool":
            result = {"type": "function_call_output", "call_id": each["tool_call_id"]}
            found.append({**result, "output": each["content"]})
            continue
        found.append({"role": each["role"], "content": each["content"]})
        found += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in each.get("tool_calls", ())
        ]
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    return {"instructions": messages[0]["content"], "input": found, "tools": tools}


def turns(play: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The kind, path and body of each request of a play."""
    messages = conversation(play)
    known = len(messages) - 2 * FRESH
    chat: dict[str, Any] = {"tools": TOOLS}
    yield "chat, first", CHAT, {**chat, "messages": messages[:known]}
    yield "chat, appended", CHAT, {**chat, "messages": messages[: known + 2]}
    edited = [*messages[: known + 4]]
    place = next(i for i, each in enumerate(edited) if len(each["content"]) == SIZES[-1])
    edited[place] = {**edited[place], "content": "[cleared]"}
    options = {"undeclared": {"tool": "amortize"}}
    yield "chat, edited", CHAT, {**chat, "messages": edited, "leyline": options}
    edited += messages[known + 4 : known + 6]
    options = {"policy": "truncate_older_than"}
    yield "chat, by a policy", CHAT, {**chat, "messages": edited, "leyline": options}
    yield "chat, streamed", CHAT, {**chat, "messages": messages[: known + 6], "stream": True}
    yield "messages, first", "/v1/messages", as_messages(messages[:known])
    yield "messages, appended", "/v1/messages", as_messages(messages[: known + 2])
    yield "responses, first", "/v1/responses", as_input(messages[:known])
    yield "responses, appended", "/v1/responses", as_input(messages[: known + 2])
    long = [*messages[:2], {"role": "user", "content": source()[-(play + 1) * CHARS :][:CHARS]}]
    yield "chat, one message", CHAT, {**chat, "messages": long}
    yield "count", "/v1/leyline/count_tokens", {**chat, "messages": messages[:known]}


def played(origin: str, holds: LoopHolds, play: int) -> dict[str, tuple[Hold, Hold]]:
    """The longest hold by the loop's own work and by threads, by kind of request."""
    found: dict[str, tuple[Hold, Hold]] = {}
    with httpx.Client(base_url=origin, timeout=120) as client:
        for kind, path, body in turns(play):
            raw = json.dumps({"model": MODEL, **body}).encode()
            holds.clear()
            answer = client.post(path, content=raw, headers=JSON)
            assert answer.status_code == 200, (kind, answer.text[:300])
            if kind == "chat, first":
                session = answer.headers["x-leyline-session"]
            if kind == "count":
                assert answer.json()["input_tokens"] > 100_000
            found[kind] = holds.longest, holds.longest_thread
        holds.clear()
        answer = client.get(f"/v1/leyline/sessions/{session}/ledger", params={"limit": 1000})
        assert answer.status_code == 200
        found["ledger"] = holds.longest, holds.longest_thread
    return found


@contextmanager
def long_talk(**settings: Any) -> Iterator[tuple[str, LoopHolds]]:
    """A proxy that splices, and what holds its loop."""
    with (
        serving(Tokenising()) as engine,
        watched_proxy(upstream=engine, log_level="error", **settings) as (origin, holds),
    ):
        deadline = time.monotonic() + 60
        while not httpx.get(f"{origin}/readyz").json()["upstreams"][0]["splices"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield origin, holds


def check(origin: str, holds: LoopHolds) -> None:
    """Play fresh conversations; what holds the loop each time is the proxy's doing, not the
    machine's."""
    all_plays = [played(origin, holds, play) for play in range(PLAYS)]
    shortest = {kind: min(each[kind][0] for each in all_plays) for kind in all_plays[0]}
    beside = {kind: min(each[kind][1] for each in all_plays) for kind in all_plays[0]}
    for found in (shortest, beside):
        too_long = {kind: hold for kind, hold in found.items() if hold.cpu_s > GOAL_S}
        assert not too_long


def test_no_turn_holds_the_loop() -> None:
    """No callback of any kind of turn takes more than 50 ms of CPU, nor does a thread keep the loop
    from running for as long."""
    with long_talk() as (origin, holds):
        check(origin, holds)
        # The control: a thread that decodes a long list without a pause is seen.
        holds.clear()
        ids = json.dumps({"model": "none", "prompt": [123_456] * 1_000_000}).encode()
        answer = httpx.post(f"{origin}/v1/completions", content=ids, headers=JSON, timeout=60)
        assert answer.status_code == 404
        assert holds.longest_thread.cpu_s > GOAL_S / 10


@pytest.mark.nightly
def test_no_turn_holds_the_loop_before_redis(tmp_path: Path) -> None:
    """No callback or thread does where each turn is stored in Redis, encrypted, either."""
    with redis_server(tmp_path) as store:
        secret = ("s" * 32,)
        with long_talk(session_store=store.url, session_secret=secret) as (origin, holds):
            check(origin, holds)
