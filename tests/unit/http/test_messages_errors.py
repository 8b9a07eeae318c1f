"""``/v1/messages`` where something goes wrong: every error has Anthropic's shape and a reason."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.claims_engine import ClaimsEngine
from support.fake_engine import DONE, MODEL, Answer, FakeEngine, chunk, proxy_before
from support.messages_route import COUNT, MESSAGES, SSE, USE, body, events, kinds
from support.metrics_page import REQUESTS, metric

from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings
from leyline_proxy.upstream.embedded import ASGIStreamTransport, lifespan_of

OVERLOAD = b'data: {"error": {"message": "no room", "type": "abort", "code": 503}}\n\n'
NO_JSON = b"data: {torn\n\n"


@pytest.mark.parametrize(
    ("parts", "breaks", "kind", "words"),
    [
        ([chunk({"content": "a"}), DONE], False, "api_error", "before its answer was complete"),
        ([chunk({"content": "a"})], False, "api_error", "before its answer was complete"),
        ([chunk({"content": "a"})], True, "api_error", "The engine"),
        ([chunk({"content": "a"}), OVERLOAD, DONE], False, "overloaded_error", "no room"),
        ([chunk({"content": "a"}), OVERLOAD, OVERLOAD], False, "overloaded_error", "no room"),
        ([chunk({"content": "a"}), NO_JSON, DONE], False, "api_error", "not a JSON object"),
    ],
    ids=["unfinished", "torn", "broken", "refused", "refused twice", "no JSON"],
)
async def test_what_goes_wrong_in_a_stream_is_its_last_event(
    engine: FakeEngine, parts: list[bytes], breaks: bool, kind: str, words: str
) -> None:
    """One ``error`` event, and no end of the message that would make it look whole."""
    engine.answers.append(Answer(parts, content_type=SSE, breaks=breaks))
    async with proxy_before(engine) as client:
        answer = await client.post(MESSAGES, json=body(stream=True))
        counted = await metric(client, REQUESTS, f'route="{MESSAGES}"', 'status="502"')
    found = events(answer.text)
    assert answer.status_code == 200
    assert kinds(found)[-1] == "error"
    assert "message_stop" not in kinds(found)
    assert kinds(found).count("error") == 1
    assert found[-1]["error"]["type"] == kind
    assert words in found[-1]["error"]["message"]
    assert found[-1]["request_id"] == answer.headers["request-id"]
    assert counted == 1


RETRY = {"retry-after": "7"}
REFUSED = [
    (Answer([], status=401), 502, "api_error", "own credentials"),
    (
        Answer([b'{"error": {"message": "too long", "code": 1}}'], status=400),
        400,
        "invalid_request_error",
        "too long",
    ),
    (
        Answer([b'{"object": "error", "message": "flat"}'], status=422),
        422,
        "invalid_request_error",
        "flat",
    ),
    (Answer([b"<html>"], status=429, headers=RETRY), 429, "rate_limit_error", "status 429"),
    (Answer([b"{}"], status=500), 500, "api_error", "status 500"),
    (Answer([b'{"error": "busy"}'], status=503, headers=RETRY), 503, "overloaded_error", "busy"),
]


@pytest.mark.parametrize("refusal", REFUSED, ids=["401", "400", "flat", "429", "500", "503"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_engines_errors_have_anthropics_shape(
    engine: FakeEngine, refusal: tuple[Answer, int, str, str], stream: bool
) -> None:
    """Their words are kept, and when to retry."""
    scripted_answer, status, kind, words = refusal
    engine.answers.append(scripted_answer)
    async with proxy_before(engine) as client:
        answer = await client.post(MESSAGES, json=body(stream=stream))
    document = answer.json()
    assert answer.status_code == status
    assert (document["type"], document["error"]["type"]) == ("error", kind)
    assert words in document["error"]["message"]
    assert document["request_id"] == answer.headers["request-id"]
    assert answer.headers.get("retry-after") == scripted_answer.headers.get("retry-after")


@pytest.mark.parametrize("answered", [b"{}", b"[]", b'{"choices": [', b'{"choices": [{}]}'])
async def test_an_answer_that_is_none_leaves_the_session_be(
    engine: FakeEngine, answered: bytes
) -> None:
    """It is refused before the turn counts."""
    engine.answers.append(Answer([answered]))
    async with proxy_before(engine) as client:
        headers = {"x-leyline-session": "s"}
        answer = await client.post(MESSAGES, json=body(), headers=headers)
        session = await client.get("/v1/leyline/sessions/s")
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "api_error")
    assert session.status_code == 404


@pytest.mark.parametrize(
    ("given_body", "param"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages[0].content[0]",
        ),
        ({"model": 7}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"leyline": {"policies": "x"}}, "leyline"),
        ({"context_management": {"edits": [{"type": "compact_20260113"}]}}, "context_management"),
        ({"leyline": {"edits": [{"message": 9, "drop": True}]}}, "leyline.edits[0].message"),
        (
            {"leyline": {"edits": [{"message": 0, "chars": [0, 999], "replacement": ""}]}},
            "leyline.edits[0].chars",
        ),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_bad_requests_name_the_field(
    engine: FakeEngine, path: str, given_body: dict[str, Any], param: str
) -> None:
    """They do so in words and in the extra member; the engine isn't asked."""
    async with proxy_before(engine) as client:
        answer = await client.post(path, json=body(**given_body))
    document = answer.json()
    assert answer.status_code == 400, document
    assert document["error"]["type"] == "invalid_request_error"
    assert param in document["error"]["message"]
    assert document["leyline"]["param"].startswith(param)
    assert not engine.bodies


async def test_only_what_runs_needs_a_limit(engine: FakeEngine) -> None:
    """A request without ``max_tokens`` is refused, but its tokens can be counted."""
    asked = body()
    del asked["max_tokens"]
    async with proxy_before(engine) as client:
        answer = await client.post(MESSAGES, json=asked)
        counted = await client.post(COUNT, json=asked)
    assert answer.json()["leyline"]["param"] == "max_tokens"
    # This engine doesn't count; that it was asked to is what matters.
    assert counted.status_code == 501


async def test_annotations_are_refused_where_the_client_wrote_them(engine: FakeEngine) -> None:
    """Places are the client's own, whatever they became in the chat request."""
    blocks = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "r"},
        {"type": "text", "text": "a"},
    ]
    talk = [
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": blocks},
        {"role": "user", "content": "b", "leyline": {"evicted": True}},
    ]
    async with proxy_before(engine) as client:
        answer = await client.post(MESSAGES, json=body(*talk, system="S"))
    document = answer.json()
    assert document["leyline"]["param"] == "messages[2].leyline"
    assert document["error"]["message"].startswith("messages[2].leyline has no field 'evicted'")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"a": ' * 3000])
async def test_bodies_that_are_no_json_object(engine: FakeEngine, raw: bytes) -> None:
    """The error says so in the right shape."""
    async with proxy_before(engine) as client:
        answer = await client.post(MESSAGES, content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_deep_body_is_refused_and_fails_nothing(engine: FakeEngine) -> None:
    """A schema of any depth gives no client a 500."""
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"items": schema}
    async with proxy_before(engine) as client:
        tools = [{"name": "ls", "input_schema": schema}]
        assert (await client.post(MESSAGES, json=body(tools=tools))).status_code == 200
        deep = {"role": "user", "content": [{"type": "text", "text": "a", "x": schema}]}
        assert (await client.post(MESSAGES, json=body(deep))).status_code == 200


async def test_keys_limits_and_models(engine: FakeEngine) -> None:
    """``x-api-key`` opens the door as a bearer does; what is refused has Anthropic's shape."""
    keys = {"api_keys": ("red:kr",), "max_body_bytes": 1024}
    async with proxy_before(engine, **keys) as client:
        right = await client.post(MESSAGES, json=body(), headers={"x-api-key": "kr"})
        bearer = await client.post(MESSAGES, json=body(), headers={"authorization": "Bearer kr"})
        wrong = await client.post(MESSAGES, json=body(), headers={"x-api-key": "k"})
        large = await client.post(
            MESSAGES, json=body(system="x" * 1100), headers={"x-api-key": "kr"}
        )
        unknown = await client.post(
            MESSAGES, json=body() | {"model": "claude"}, headers={"x-api-key": "kr"}
        )
        uncounted = await client.post(COUNT, json=body())
    assert (right.status_code, bearer.status_code) == (200, 200)
    refused = {
        (answer.status_code, answer.json()["error"]["type"])
        for answer in (wrong, large, unknown, uncounted)
    }
    assert refused == {
        (401, "authentication_error"),
        (413, "request_too_large"),
        (404, "not_found_error"),
    }
    assert MODEL in unknown.json()["error"]["message"]


async def test_slow_and_dead_engines_are_named(engine: FakeEngine) -> None:
    """Silence is a timeout, a refused connection an error of the API."""
    engine.answers.append(Answer(hangs=True))
    async with proxy_before(engine, first_token_timeout_s=0.1) as client:
        slow = await client.post(MESSAGES, json=body())
    app = create_app(Settings(upstream="http://127.0.0.1:9", connect_timeout_s=0.5))
    transport = ASGIStreamTransport(app)
    async with (
        lifespan_of(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        dead = await client.post(MESSAGES, json=body())
    assert (slow.status_code, slow.json()["error"]["type"]) == (504, "timeout_error")
    assert (dead.status_code, dead.json()["error"]["type"]) == (502, "api_error")


@pytest.mark.parametrize(("stream", "late"), [(False, False), (True, False), (True, True)], ids=str)
async def test_requests_that_do_not_fit_beside_claims(stream: bool, late: bool) -> None:
    """Overloaded, with the claims in the way, and when to retry where there is a status."""
    engine = ClaimsEngine(pool=400, share=1.0, engine_share=1.0)
    headers = {"x-leyline-session": "s"}
    async with proxy_before(engine, claims_interval_s=60) as client:
        assert (await client.post(MESSAGES, json=long("x", 200), headers=headers)).is_success
        claim = {"session": "s", "id": "plan", "kind": "hard", "ttl_s": 90, "predicate": {}}
        assert (await client.post("/v1/leyline/claims", json=claim)).status_code == 201
        engine.breaks_off = 1 if late else None
        answer = await client.post(MESSAGES, json=long("y", 300, stream=stream), headers=headers)
    document = events(answer.text)[-1] if late else answer.json()
    assert answer.status_code == (200 if late else 503)
    assert document["error"]["type"] == "overloaded_error"
    assert "plan" in document["error"]["message"]
    assert document["leyline"]["code"] == "refused_by_claim"
    assert document["leyline"]["claims"] == ["plan"]
    assert late or answer.headers["retry-after"] == "90"


def long(letter: str, size: int, **members: Any) -> dict[str, Any]:
    """A request of a size."""
    return body({"role": "user", "content": letter * size}, **members)


async def test_counting_before_an_engine_that_does_not_count(engine: FakeEngine) -> None:
    """The count is unknown then, and the error says so."""
    async with proxy_before(engine) as client:
        answer = await client.post(COUNT, json=body())
        assert await metric(client, REQUESTS, f'route="{COUNT}"', 'status="501"') == 1
    assert answer.status_code == 501
    assert answer.json()["error"]["type"] == "invalid_request_error"
