"""Bare completions: what policies forget is taken out of prompts, too, or nothing is sent."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.fake_engine import MODEL, FakeEngine, chat_json, proxy_before

COMPLETIONS = "/v1/completions"
REDACT = r"redact:pattern='sk-\w+',replacement='[gone]'"


async def complete(client: httpx.AsyncClient, **members: Any) -> httpx.Response:
    """One bare completion."""
    return await client.post(COMPLETIONS, json={"model": MODEL, **members})


@pytest.mark.parametrize("chosen", ["by the request", "by the operator"])
async def test_a_prompt_is_searched_by_policies_that_forget(chosen: str) -> None:
    """Prompt, list of prompts and suffix go out without the secret, whoever chose the policy."""
    engine = FakeEngine(capability=None)
    engine.answers = [chat_json(), chat_json()]
    by_request = chosen == "by the request"
    options = {"leyline": {"policy": REDACT}} if by_request else {}
    async with proxy_before(engine, policy="keep_all" if by_request else REDACT) as client:
        one = await complete(client, prompt="Use sk-4f9a.", suffix="sk-4f9a it was", **options)
        some = await complete(client, prompt=["Hello.", "Use sk-4f9a."], **options)
    assert (one.status_code, some.status_code) == (200, 200)
    first, second = (json.loads(body) for body in engine.bodies)
    assert (first["prompt"], first["suffix"]) == ("Use [gone].", "[gone] it was")
    assert second["prompt"] == ["Hello.", "Use [gone]."]


async def test_a_prompt_without_a_find_keeps_its_bytes() -> None:
    """Nothing is rewritten where nothing is taken out; policies that only shorten don't run."""
    engine = FakeEngine(capability=None)
    engine.answers = [chat_json(), chat_json()]
    raw = b'{"model" : "fake-model",\n "prompt":"caf\\u00e9", "n":1.0e0}'
    async with proxy_before(engine, policy=REDACT) as client:
        await client.post(COMPLETIONS, content=raw)
    clamp = "head_tail_clamp:max_chars=9,head_chars=2,tail_chars=2"
    async with proxy_before(engine, policy=clamp) as client:
        await client.post(COMPLETIONS, content=raw.replace(b"caf", b"a long prompt" * 9))
    assert engine.bodies == [raw, raw.replace(b"caf", b"a long prompt" * 9)]


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2], [3]], {"text": "x"}, ["x", 7]])
async def test_what_can_not_be_searched_is_refused_by_field(prompt: object) -> None:
    """Token ids go to no engine where a policy must take something out of the prompt."""
    engine = FakeEngine(capability=None)
    async with proxy_before(engine, policy=REDACT) as client:
        refused = await complete(client, prompt=prompt)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert engine.bodies == []


async def test_token_ids_pass_where_nothing_is_to_be_forgotten() -> None:
    """Without a policy that forgets, a prompt is the engine's to judge."""
    engine = FakeEngine(capability=None)
    engine.answers = [chat_json()]
    async with proxy_before(engine) as client:
        assert (await complete(client, prompt=[1, 2, 3])).status_code == 200
    assert json.loads(engine.bodies[0])["prompt"] == [1, 2, 3]


async def test_a_search_that_fails_sends_nothing() -> None:
    """A policy whose pattern runs out of time refuses a prompt as it refuses a message."""
    engine = FakeEngine(capability=None)
    engine.answers = [chat_json()]
    slow = "redact:pattern='(?=a)(a|aa)+$',on_timeout=fail"
    async with proxy_before(engine, policy=slow) as client:
        refused = await complete(client, prompt="a" * 4000 + "b")
    assert refused.status_code == 502
    assert refused.json()["error"]["code"] == "policy_failed_closed"
    assert engine.bodies == []
