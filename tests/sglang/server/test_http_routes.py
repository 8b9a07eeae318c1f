"""Leyline's routes on SGLang's own server, and the receipts that they serve."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.utils.auth import add_api_key_middleware
from sglang_models import shipped_model
from sglang_server import SglangServer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from leyline_engine.admit.packed_hints import MAX_ENVELOPE_BYTES
from leyline_engine.contract import (
    CAPABILITY_PATH,
    RECEIPT_PATH,
    RECORD_MEMBER,
    RENDERER_PATH,
    Capability,
    EditPayload,
    Outcome,
    Reason,
    Receipt,
    TurnRecord,
    edit_envelope,
)
from leyline_engine.server.channel import ENDPOINT_VARIABLE, ReceiptChannel
from leyline_engine.sglang.server.http import EngineHttp, sglang_endpoints

ROUTES = ("/v1/chat/completions", "/v1/completions", "/generate")
NEW_TOKENS = 12
WAIT_S = 10.0
KEY = "the engine's key"


@pytest.fixture
def client(mla_server: SglangServer) -> Iterator[httpx.Client]:
    """A client of the shared server."""
    with httpx.Client(base_url=mla_server.base_url, timeout=120) as opened:
        yield opened


def envelope(message_id: str) -> dict[str, Any]:
    payload = EditPayload(session=f"of {message_id}", scope="t", turn="t0")
    return json.loads(msgspec.json.encode(edit_envelope(message_id, payload)))


def body_of(route: str, model: str, custom: dict[str, Any] | None, stream: bool) -> dict[str, Any]:
    """A greedy request for ``NEW_TOKENS`` tokens in the form that ``route`` wants."""
    text = "Tell me about caches."
    sampling = {"temperature": 0, "ignore_eos": True} | (
        {"custom_params": custom} if custom is not None else {}
    )
    match route:
        case "/generate":
            parameters = sampling | {"max_new_tokens": NEW_TOKENS}
            return {"text": text, "sampling_params": parameters, "stream": stream}
        case "/v1/completions":
            prompt: dict[str, Any] = {"prompt": text}
        case _:
            prompt = {"messages": [{"role": "user", "content": text}]}
    return prompt | sampling | {"model": model, "max_tokens": NEW_TOKENS, "stream": stream}


def model_of(client: httpx.Client) -> str:
    name: str = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    return name


def text_of(route: str, answer: httpx.Response, stream: bool) -> str:
    """The text of the model's answer."""
    answer.raise_for_status()
    if not stream:
        pieces = [answer.json()]
    else:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        pieces = [json.loads(line) for line in lines[:-1]]
    if route == "/generate":
        return str(pieces[-1]["text"])
    choices = [choice for piece in pieces for choice in piece["choices"]]
    if route == "/v1/completions":
        return "".join(choice["text"] for choice in choices)
    said = [choice["delta" if stream else "message"] for choice in choices]
    return "".join(message.get("content") or "" for message in said)


def record_of(client: httpx.Client, message_id: str) -> TurnRecord:
    """The finished record of a request; it may lag a moment after the answer."""
    deadline = time.monotonic() + WAIT_S
    while True:
        answer = client.get(RECEIPT_PATH.format(message_id=message_id))
        if answer.status_code == httpx.codes.OK:
            record = msgspec.json.decode(answer.content, type=TurnRecord)
            if record.finished:
                return record
        assert time.monotonic() < deadline, f"no finished record: {answer.text[:500]}"
        time.sleep(0.02)


def tokenizer_of(client: httpx.Client) -> Tokenizer:
    return Tokenizer.from_str(client.get(RENDERER_PATH).raise_for_status().json()["tokenizer_json"])


def counted(client: httpx.Client) -> float:
    """The number of requests with an envelope that the server has counted."""
    families = text_string_to_metric_families(client.get("/metrics").raise_for_status().text)
    samples = (sample for family in families for sample in family.samples)
    name = "leyline_engine_requests_total"
    return sum(sample.value for sample in samples if sample.name == name)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_yields_a_receipt(client: httpx.Client, route: str, stream: bool) -> None:
    """The record gives the outcome of the request, and the tokens that the model generated."""
    message_id = f"m{route.replace('/', '-')}-{stream}"
    before = counted(client)
    custom = {"kv_hints": envelope(message_id)}
    answer = client.post(route, json=body_of(route, model_of(client), custom, stream))
    text = text_of(route, answer, stream)
    record = record_of(client, message_id)
    assert record.receipt.outcome is Outcome.UNEDITED
    assert record.receipt.session == f"of {message_id}"
    tokens = record.receipt.tokens
    assert tokens.prompt == tokens.prefix + tokens.spliced + tokens.prefilled > 0
    assert len(record.output_ids) == NEW_TOKENS
    assert tokenizer_of(client).decode(list(record.output_ids)).startswith(text.rstrip("\ufffd"))
    assert text
    assert counted(client) == before + 1


def test_the_native_envelope_yields_a_receipt(client: httpx.Client) -> None:
    """SGLang's own ``kv_hints`` on ``/generate`` is answered as the one in ``custom_params``."""
    body = body_of("/generate", "", None, stream=False) | {"kv_hints": envelope("m-native")}
    answer = client.post("/generate", json=body).raise_for_status().json()
    assert list(record_of(client, "m-native").output_ids) == answer["output_ids"]


def test_envelopes_change_no_answer(client: httpx.Client) -> None:
    """Requests with and without an envelope share a batch, and say the same greedy tokens."""

    def ask(number: int) -> str:
        custom = {"kv_hints": envelope(f"m-mixed-{number}")} if number % 2 else None
        body = body_of("/generate", "", custom, stream=False)
        return text_of("/generate", client.post("/generate", json=body), stream=False)

    with ThreadPoolExecutor(6) as pool:
        answers = set(pool.map(ask, range(6)))
    assert len(answers) == 1
    assert record_of(client, "m-mixed-1").receipt.outcome is Outcome.UNEDITED


@pytest.mark.parametrize(
    "raw",
    [
        {"message_id": "m-malformed"},
        {**envelope("m-malformed"), "actions": [{"action_id": "a"}]},
        {**envelope("m-malformed"), "padding": "x" * MAX_ENVELOPE_BYTES},
    ],
    ids=["incomplete", "wrong action", "too large"],
)
def test_a_bad_envelope_fails_no_request(client: httpx.Client, raw: dict[str, Any]) -> None:
    """The request is served as if it had none; its receipt names the reason."""
    route = "/v1/chat/completions"
    plain = client.post(route, json=body_of(route, model_of(client), None, stream=False))
    message_id = f"m-malformed-{len(str(raw))}"
    custom = {"kv_hints": raw | {"message_id": message_id}}
    answer = client.post(route, json=body_of(route, model_of(client), custom, stream=False))
    assert text_of(route, answer, stream=False) == text_of(route, plain, stream=False)
    receipt = record_of(client, message_id).receipt
    assert (receipt.outcome, receipt.reason) == (Outcome.REPREFILLED, Reason.INVALID_EDIT)
    assert receipt.detail


def test_a_malformed_native_envelope_is_sglangs_to_refuse(client: httpx.Client) -> None:
    """SGLang answers 400 by itself, before any plugin; our proxy doesn't use this way."""
    body = body_of("/generate", "", None, stream=False) | {"kv_hints": {"message_id": "m"}}
    assert client.post("/generate", json=body).status_code == httpx.codes.BAD_REQUEST


def test_the_engine_says_what_it_is(client: httpx.Client) -> None:
    """The handshake document comes from the scheduler of this server."""
    answer = client.get(CAPABILITY_PATH).raise_for_status()
    capability = msgspec.json.decode(answer.content, type=Capability)
    assert capability.engine == "sglang"
    assert capability.vocab_size > 0


def test_the_renderer_document_is_the_engines(client: httpx.Client) -> None:
    """Its tokenizer gives the engine's own token ids; its template is the model's."""
    text = "Grüß dich! 你好 👋\n\n\tWhat does `a  b` mean?"
    document = client.get(RENDERER_PATH).raise_for_status().json()
    engine = client.post("/tokenize", json={"prompt": text}).raise_for_status().json()["tokens"]
    assert Tokenizer.from_str(document["tokenizer_json"]).encode(text).ids == engine
    model = AutoTokenizer.from_pretrained(shipped_model())
    assert document["chat_template"] == model.chat_template
    assert document["special_tokens"]["eos_token"] == model.eos_token


def test_an_unknown_message_is_not_found(client: httpx.Client) -> None:
    """A record that isn't kept is a 404 in OpenAI's shape."""
    answer = client.get(RECEIPT_PATH.format(message_id="m-nobody"))
    assert answer.status_code == httpx.codes.NOT_FOUND
    assert answer.json()["error"]["code"] == "not_found"


@pytest.fixture
def channel() -> Iterator[ReceiptChannel]:
    """A channel to which no scheduler has spoken."""
    opened = ReceiptChannel()
    yield opened
    opened.close()


@pytest.fixture
async def guarded(channel: ReceiptChannel) -> AsyncIterator[httpx.AsyncClient]:
    """The routes with SGLang's own key check, in this process."""
    app = FastAPI()
    tokenizer = AutoTokenizer.from_pretrained(shipped_model())
    manager = SimpleNamespace(tokenizer=tokenizer)
    endpoints = sglang_endpoints(channel, manager, TemplateManager(), template_kwargs={})
    app.router.routes.extend(endpoints.routes())
    add_api_key_middleware(app, api_key=KEY, admin_api_key=None)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as opened:
        yield opened


@pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")  # SGLang answers with it
@pytest.mark.parametrize("path", [CAPABILITY_PATH, RENDERER_PATH, RECEIPT_PATH])
async def test_sglangs_api_key_guards_the_routes(
    guarded: httpx.AsyncClient, channel: ReceiptChannel, path: str
) -> None:
    """Without ``--api-key``'s value nothing is shown; with it, the route answers for itself."""
    channel.records.put(TurnRecord(receipt=Receipt(message_id="m"), output_ids=(1, 2)))
    path = path.format(message_id="m")
    for headers in ({}, {"authorization": "Bearer another"}):
        assert (await guarded.get(path, headers=headers)).status_code == httpx.codes.UNAUTHORIZED
    allowed = await guarded.get(path, headers={"authorization": f"Bearer {KEY}"})
    assert allowed.status_code in {httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE}


async def test_an_engine_whose_schedulers_are_silent_is_not_ready(
    guarded: httpx.AsyncClient,
) -> None:
    """If the plugin failed in the schedulers, the capability is a 503 and never a guess."""
    answer = await guarded.get(CAPABILITY_PATH, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert answer.json()["error"]["code"] == "not_ready"


def test_only_the_first_node_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no HTTP is served, schedulers are given no endpoint, not even an inherited one."""
    monkeypatch.setenv(ENDPOINT_VARIABLE, "ipc:///of/another/launch")
    EngineHttp().before_launch(SimpleNamespace(node_rank=1, dp_size=1))
    assert ENDPOINT_VARIABLE not in os.environ


def asking(message_id: str) -> dict[str, Any]:
    """An envelope that asks for its record in the answer."""
    payload = EditPayload(session=f"of {message_id}", scope="t", turn="t0")
    envelope = edit_envelope(message_id, payload, receipt_in_answer=True)
    return json.loads(msgspec.json.encode(envelope))


def parts_of(answer: httpx.Response, stream: bool) -> list[bytes]:
    """The answer's JSON objects, less the record, whose bytes come last."""
    answer.raise_for_status()
    if not stream:
        return [answer.content]
    *events, end = [line for line in answer.content.split(b"\n\n") if line]
    assert end == b"data: [DONE]"
    return [event.removeprefix(b"data: ") for event in events]


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
    """It is the last member of the body, or of the first chunk that finishes, and the one that the
    side channel has; nothing else of the answer is touched."""
    message_id = f"m-in-answer-{time.monotonic_ns()}"
    custom = {"kv_hints": asking(message_id)}
    body = body_of("/v1/chat/completions", model_of(client), custom, stream=False) | given
    answer = client.post("/v1/chat/completions", json=body)
    parts = parts_of(answer, bool(given.get("stream")))
    carriers = [part for part in parts if RECORD_MEMBER.encode() in part]
    assert len(carriers) == 1
    assert carriers[0] == next(part for part in parts if b'"finish_reason":"' in part)
    before, found, member = carriers[0].partition(f',"{RECORD_MEMBER}":'.encode())
    assert found and json.loads(before + b"}")["choices"]
    record = msgspec.json.decode(member.removesuffix(b"}"), type=TurnRecord)
    kept = record_of(client, message_id)
    if "n" in given:
        # Each answer has a record of the same name; the side channel has that of the last to end.
        assert (kept.receipt.session, kept.finished) == (record.receipt.session, True)
    else:
        assert record == kept
    assert record.finished and record.output_ids


def test_only_who_asks_gets_the_record(client: httpx.Client) -> None:
    """An envelope of before, another route, and a request without an envelope don't get it."""
    for route, custom in (
        ("/v1/chat/completions", {"kv_hints": envelope("m-not-asked")}),
        ("/v1/chat/completions", None),
        ("/v1/completions", {"kv_hints": asking("m-completions")}),
        ("/generate", {"kv_hints": asking("m-generate")}),
    ):
        answer = client.post(route, json=body_of(route, model_of(client), custom, stream=True))
        assert answer.status_code == 200 and RECORD_MEMBER not in answer.text
    assert record_of(client, "m-completions").receipt.skipped_actions == ()
    document = client.get(CAPABILITY_PATH).content
    assert msgspec.json.decode(document, type=Capability).receipt_in_answer


def test_a_burst_of_answers_brings_each_its_own(client: httpx.Client) -> None:
    """Records overtake the last tokens on their way, also where many turns end at once."""
    model = model_of(client)

    def ask(number: int) -> tuple[str, str]:
        message_id = f"m-burst-{number}"
        custom = {"kv_hints": asking(message_id)}
        body = body_of("/v1/chat/completions", model, custom, stream=bool(number % 2))
        text = client.post("/v1/chat/completions", json=body).text
        found = text.partition(f'"{RECORD_MEMBER}":{{"receipt":{{"message_id":"')[2]
        return message_id, found.partition('"')[0]

    with ThreadPoolExecutor(16) as pool:
        for wanted, found in pool.map(ask, range(48)):
            assert found == wanted
