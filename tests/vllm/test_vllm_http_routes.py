"""Leyline's routes on vLLM's own server, and what its requests and answers carry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from vllm_server import API_KEY, VllmServer

from leyline_engine.contract import (
    CAPABILITY_PATH,
    CLAIMS_PATH,
    LEDGER_PATH,
    RECEIPT_PATH,
    RECORD_MEMBER,
    RENDERER_PATH,
    TOKENS_PATH,
    Capability,
    ClaimReply,
    EditPayload,
    ListClaims,
    TurnRecord,
    edit_envelope,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NEW_TOKENS = 4
_NUMBERS = count()


@pytest.fixture
def client(vllm_server: VllmServer) -> Iterator[httpx.Client]:
    """A client of the shared server, with its key."""
    key = {"authorization": f"Bearer {API_KEY}"}
    with httpx.Client(base_url=vllm_server.base_url, timeout=120, headers=key) as opened:
        yield opened


def asking(message_id: str) -> dict[str, Any]:
    """An envelope that asks for its record in the answer."""
    payload = EditPayload(session=f"of {message_id}", scope="t", turn="t0")
    envelope = edit_envelope(message_id, payload, receipt_in_answer=True)
    return json.loads(msgspec.json.encode(envelope))


def body_of(client: httpx.Client, route: str, message_id: str | None) -> dict[str, Any]:
    """A greedy request."""
    text = "Tell me about caches."
    prompt: dict[str, Any] = {"prompt": text}
    if route == CHAT:
        prompt = {"messages": [{"role": "user", "content": text}]}
    if message_id is not None:
        prompt["custom_params"] = {"kv_hints": asking(message_id)}
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    return prompt | {"model": model, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}


def record_of(client: httpx.Client, message_id: str) -> TurnRecord:
    answer = client.get(RECEIPT_PATH.format(message_id=message_id)).raise_for_status()
    return msgspec.json.decode(answer.content, type=TurnRecord)


def parts_of(answer: httpx.Response, stream: bool) -> list[bytes]:
    """The answer's JSON objects."""
    answer.raise_for_status()
    if not stream:
        return [answer.content]
    *events, end = [line for line in answer.content.split(b"\n\n") if line]
    assert end == b"data: [DONE]"
    return [event.removeprefix(b"data: ") for event in events]


def test_the_key_guards_the_routes(vllm_server: VllmServer) -> None:
    """vLLM guards only its own paths; Leyline's ask for the same key."""
    for headers in ({}, {"authorization": "Bearer another"}):
        with httpx.Client(base_url=vllm_server.base_url, headers=headers) as other:
            for path in (CAPABILITY_PATH, RENDERER_PATH, RECEIPT_PATH.format(message_id="m")):
                assert other.get(path).status_code == httpx.codes.UNAUTHORIZED
            for path in (CLAIMS_PATH, LEDGER_PATH, TOKENS_PATH):
                assert other.post(path, content=b"{}").status_code == httpx.codes.UNAUTHORIZED


def test_the_engine_gives_its_capability(client: httpx.Client) -> None:
    """It comes from the engine core, and answers bring records."""
    document = client.get(CAPABILITY_PATH).raise_for_status().content
    capability = msgspec.json.decode(document, type=Capability)
    assert (capability.engine, capability.receipt_in_answer) == ("vllm", True)
    assert capability.is_of(client.get("/v1/models").json()["data"][0]["id"])


def test_a_command_comes_to_the_engine_core(client: httpx.Client) -> None:
    """The list of claims is empty; many commands at once have each an answer."""
    body = msgspec.json.encode(ListClaims())
    with ThreadPoolExecutor(4) as pool:
        for answer in pool.map(lambda _: client.post(CLAIMS_PATH, content=body), range(8)):
            assert msgspec.json.decode(answer.content, type=ClaimReply).claims == ()
    assert client.post(CLAIMS_PATH, content=b"{}").status_code == httpx.codes.BAD_REQUEST


ANSWERS: dict[str, dict[str, Any]] = {
    "whole": {},
    "stream": {"stream": True},
    "stream with usage": {"stream": True, "stream_options": {"include_usage": True}},
    "several": {"n": 2, "temperature": 1.0},
    "several streamed": {"n": 2, "temperature": 1.0, "stream": True},
    "with logprobs": {"stream": True, "logprobs": True, "top_logprobs": 2},
    "stopped": {"stream": True, "stop": ["e", "a", " "], "ignore_eos": False},
}


@pytest.mark.parametrize("given", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_brings_its_record(client: httpx.Client, given: dict[str, Any]) -> None:
    """It is the last member of the body, or of the first chunk that finishes; nothing else of the
    answer is touched."""
    message_id = f"m-in-answer-{next(_NUMBERS)}"
    answer = client.post(CHAT, json=body_of(client, CHAT, message_id) | given)
    parts = parts_of(answer, bool(given.get("stream")))
    carriers = [part for part in parts if RECORD_MEMBER.encode() in part]
    assert len(carriers) == 1
    assert carriers[0] == next(part for part in parts if b'"finish_reason":"' in part)
    before, found, member = carriers[0].partition(f',"{RECORD_MEMBER}":'.encode())
    assert found and json.loads(before + b"}")["choices"]
    record = msgspec.json.decode(member.removesuffix(b"}"), type=TurnRecord)
    assert (record.receipt.message_id, record.finished) == (message_id, True)
    if "n" not in given:
        assert record == record_of(client, message_id)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_envelopes_change_no_answer(client: httpx.Client, stream: bool) -> None:
    """Of completions, too, which bring no record but leave one."""
    message_id = f"m-completion-{next(_NUMBERS)}"
    texts = set()
    for name in (None, message_id):
        body = body_of(client, COMPLETIONS, name) | {"stream": stream}
        parts = parts_of(client.post(COMPLETIONS, json=body), stream)
        texts.add("".join(json.loads(part)["choices"][0]["text"] for part in parts))
        assert not any(RECORD_MEMBER.encode() in part for part in parts)
    assert len(texts) == 1
    assert record_of(client, message_id).finished


def test_an_unknown_message_is_not_found(client: httpx.Client) -> None:
    """A record that isn't kept is a 404 in OpenAI's shape."""
    answer = client.get(RECEIPT_PATH.format(message_id="m-nobody"))
    assert answer.status_code == httpx.codes.NOT_FOUND
    assert answer.json()["error"]["code"] == "not_found"


def test_the_renderer_document_is_the_engines(
    client: httpx.Client, vllm_server: VllmServer
) -> None:
    """Its tokenizer gives the engine's own token ids; its template is the model's."""
    text = "Grüß dich! 你好 👋\n\n\tWhat does `a  b` mean?"
    document = client.get(RENDERER_PATH).raise_for_status().json()
    engine = client.post("/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"]
    assert Tokenizer.from_str(document["tokenizer_json"]).encode(text).ids == engine
    model = AutoTokenizer.from_pretrained(vllm_server.model)
    assert document["chat_template"] == model.chat_template
    assert document["special_tokens"]["eos_token"] == model.eos_token
    assert (document["dialect"], document["tokens_path"]) == ("vllm", TOKENS_PATH)


def test_the_tokens_of_a_chat_are_those_that_it_runs_with(client: httpx.Client) -> None:
    """Thinking and options count, and tools that this server lets nobody call are shown."""
    messages = [
        {"role": "user", "content": "Two and two?"},
        {"role": "assistant", "reasoning_content": "2 + 2", "content": "Four."},
        {"role": "user", "content": "And three?"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    body = body_of(client, CHAT, None) | {"messages": messages, "tools": tools}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    ran = body | {"return_token_ids": True, "tool_choice": "none"}
    answer = client.post(CHAT, json=ran).raise_for_status().json()
    found = client.post(TOKENS_PATH, json=body).raise_for_status().json()["tokens"]
    assert found == answer["prompt_token_ids"]
    refused = client.post(TOKENS_PATH, json=body | {"chat_template": "{{ 1 }}"})
    assert refused.status_code == httpx.codes.BAD_REQUEST
