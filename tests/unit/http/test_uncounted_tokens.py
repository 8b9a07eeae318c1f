"""Tokens that nobody counts: budgets charge them by their bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from support.fake_engine import DONE, MODEL, Answer, FakeEngine, chat_json, chunk, proxy_before
from test_budget_paths import BARE, CHAT, COMPLETIONS, EMBEDDINGS, RED, SSE, TURN, red, used

from leyline_policies.context import PICTURE_TOKENS

AUDIO = "/v1/audio/transcriptions"
LONG = "tokens that somebody pays for, " * 40
SIZE = len(LONG) // 4


def plain() -> FakeEngine:
    """An engine without receipts, whose streams have no usage."""
    return FakeEngine(capability=None)


def unbilled() -> Answer:
    """A stream without usage."""
    return Answer([chunk({"content": "a"}), chunk({}, "stop"), DONE], content_type=SSE)


async def charged(engine: FakeEngine, path: str, **request: Any) -> float:
    """The charge of one request."""
    async with proxy_before(engine, **red(10**6)) as client:
        await client.post(path, headers={**RED, **request.pop("headers", {})}, **request)
        spent, held = await used(client)
    assert held == 0
    return spent


ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_no_encoding_is_free(engine: FakeEngine, encoding: str) -> None:
    """A body of another path costs a token for four bytes, however it is encoded."""
    engine.scripted = {EMBEDDINGS: Answer([b"{}"])}
    body = json.dumps({"model": MODEL, "input": LONG}).encode(encoding)
    kind = {"content-type": f"application/json; charset={encoding}"}
    assert await charged(engine, EMBEDDINGS, content=body, headers=kind) == -(-len(body) // 4)


async def test_a_list_of_ids_costs_each_of_them(engine: FakeEngine) -> None:
    """On another path each id is a token, although it has two bytes; and forms count, too."""
    engine.scripted = {EMBEDDINGS: Answer([b"{}"]), AUDIO: Answer([b"{}"])}
    ids = json.dumps({"model": MODEL, "input": [1] * 500}, separators=(",", ":")).encode()
    assert 500 <= await charged(engine, EMBEDDINGS, content=ids) <= 510
    files = {"file": ("a.wav", bytes(4000))}
    assert await charged(engine, AUDIO, files=files, data={"prompt": LONG}) > 1000 + SIZE


async def test_what_a_model_writes_on_another_path_is_charged(engine: FakeEngine) -> None:
    """A transcription costs its answer, whole or cut; vectors cost nothing."""
    whole, cut = Answer([LONG.encode()]), Answer([LONG.encode()], breaks=True)
    files = {"file": ("a.wav", b"sound")}
    engine.scripted = {AUDIO: Answer([b"{}"])}
    base = await charged(engine, AUDIO, files=files)
    for answer in (whole, cut):
        engine.scripted = {AUDIO: answer}
        assert base + SIZE - 1 <= await charged(engine, AUDIO, files=files) <= base + SIZE + 1
    engine.scripted = {EMBEDDINGS: whole}
    assert await charged(engine, EMBEDDINGS, content=b"{}") == 1


FUNCTION = {"name": "f", "description": LONG, "parameters": {"type": "object"}}
UNSEEN: dict[str, dict[str, Any]] = {
    "tools": {"tools": [{"type": "function", "function": FUNCTION}]},
    "functions": {"functions": [FUNCTION]},
    "response_format": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"description": LONG}},
        }
    },
    "documents": {"documents": [{"text": LONG}]},
    "template": {"chat_template_kwargs": {"said": LONG}},
}
MESSAGES: dict[str, dict[str, Any]] = {
    "name": {"role": "user", "content": "Hi.", "name": LONG},
    "reasoning": {"role": "assistant", "content": "Hi.", "reasoning": LONG},
    "refusal": {"role": "assistant", "content": "Hi.", "refusal": LONG},
    "picture": {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{LONG}"}}],
    },
    "audio": {
        "role": "user",
        "content": [{"type": "input_audio", "input_audio": {"data": LONG, "format": "wav"}}],
    },
}


@pytest.mark.parametrize("where", [*UNSEEN, *MESSAGES])
async def test_nothing_in_front_of_an_engine_without_usage_is_free(where: str) -> None:
    """Tools, formats, documents, reasoning, names and sounds cost their bytes, if the engine counts
    nothing, and a picture costs what models take a screen at; a member that no model reads costs
    nothing."""
    charges = []
    first = {"role": "user", "content": "Hi."}
    message = MESSAGES.get(where, first)
    for more, said in (
        ({}, first),
        ({"metadata": {"a": LONG}}, first),
        (UNSEEN.get(where), message),
    ):
        engine = plain()
        engine.answers = [unbilled()]
        body = {**TURN, "messages": [said, first], "stream": True, **(more or {})}
        charges.append(await charged(engine, CHAT, json=body))
    assert 0 < charges[0] == charges[1] < 20
    # A picture has no text beside it, which "Hi." would be a token of.
    size = PICTURE_TOKENS - 1 if where == "picture" else SIZE
    assert charges[0] + size <= charges[2] <= charges[0] + size + 60


@pytest.mark.parametrize(
    "prompt",
    [LONG, [LONG], [1] * SIZE, [[1] * SIZE], [1.0] * SIZE, {"prompt_token_ids": [1] * SIZE}],
)
async def test_no_spelling_of_a_prompt_is_free(engine: FakeEngine, prompt: object) -> None:
    """A bare prompt costs its tokens or bytes in each form, and so do a suffix and a schema."""
    for more in ({}, {"suffix": LONG}, {"guided_json": {"description": LONG}}):
        engine.answers = [unbilled()]
        body = {**BARE, "prompt": prompt, "stream": True, **more}
        expected = SIZE * (2 if more else 1)
        assert expected <= await charged(engine, COMPLETIONS, json=body) <= expected + 20


async def test_a_character_of_several_bytes_is_no_cheaper(engine: FakeEngine) -> None:
    """A script whose characters have three bytes costs three quarters of a token for each."""
    engine.answers = [unbilled()]
    body = {**BARE, "prompt": "語" * 400, "stream": True}
    assert await charged(engine, COMPLETIONS, json=body) == 300 + 2


USAGES: tuple[object, ...] = (
    {"prompt_tokens": 0, "completion_tokens": 0},
    {"prompt_tokens": -5, "completion_tokens": -7},
    {"prompt_tokens": "10", "completion_tokens": "2"},
    {"prompt_tokens": 1.5, "completion_tokens": None},
    {"prompt_tokens": True, "completion_tokens": False},
    {},
)


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_usage_that_counts_nothing_is_none(path: str, usage: Any) -> None:
    """An engine that reports zero, negative or unreadable counts has its answers estimated."""
    charges = []
    for told in (None, usage):
        engine = plain()
        parts = [chunk({"content": "a"}), chunk({"content": "b"}), chunk({}, "stop")]
        ends = [chunk({}, usage=told)] if told is not None else []
        engine.answers = [Answer([*parts, *ends, DONE], content_type=SSE)]
        body = {**(TURN if path == CHAT else BARE), "stream": True}
        body["stream_options"] = {"include_usage": told is not None}
        charges.append(await charged(engine, path, json=body))
    assert charges[0] == charges[1] > 3


async def test_a_whole_answer_without_usage_costs_its_text() -> None:
    """Its bytes count, where the engine counts nothing."""
    charges = []
    for text in ("Hi.", LONG):
        engine = plain()
        engine.answers = [chat_json(text, usage=None)]
        charges.append(await charged(engine, CHAT, json=TURN))
    assert SIZE - 2 <= charges[1] - charges[0] <= SIZE + 2


LEAVES: dict[str, Callable[[], Answer]] = {
    "before the first byte": lambda: Answer(hangs=True),
    "in the middle": lambda: Answer([chunk({"content": "a"})], content_type=SSE, hangs=True),
}


@pytest.mark.parametrize("when", LEAVES)
async def test_a_client_that_leaves_pays_for_its_prompt(engine: FakeEngine, when: str) -> None:
    """A cancelled stream costs the prompt, on each path, whenever it was cancelled."""
    for path in (CHAT, COMPLETIONS, EMBEDDINGS):
        engine.answers, engine.scripted = [LEAVES[when]()], {EMBEDDINGS: LEAVES[when]()}
        async with proxy_before(engine, **red(10**6)) as client:
            body = {**(TURN if path == CHAT else BARE), "stream": True, "prompt": LONG}
            body |= {"messages": [{"role": "user", "content": LONG}]} if path == CHAT else {}
            with pytest.raises(httpx.TimeoutException):
                await client.post(path, json=body, headers=RED, timeout=0.3)
            for _ in range(200):
                spent, held = await used(client)
                if spent and not held:
                    break
                await asyncio.sleep(0.05)
            assert spent >= SIZE and not held
