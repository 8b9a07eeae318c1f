"""Limits of requests: size, number and depth, each a clean error in the API's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_engine import MODEL, FakeEngine, proxy_before

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
COUNT = "/v1/leyline/count_tokens"
MESSAGE = {"role": "user", "content": "Hi."}


def nested(depth: int, *, array: bool) -> str:
    """JSON of that depth."""
    opening, closing = ("[", "]") if array else ('{"a":', "}")
    return opening * depth + "1" + closing * depth


def placed(deep: str, where: str) -> str:
    """A chat request, or a message request, with ``deep`` in one place."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 10, "messages": [MESSAGE]}
    if where == "content":
        body["messages"] = [{"role": "user", "content": "DEEP"}]
    elif where == "arguments":
        call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "DEEP"}}
        body["messages"] += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    elif where == "member":
        body["messages"] = [{**MESSAGE, "cache_control": "DEEP"}]
    elif where == "tools":
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": "DEEP"}}]
    elif where == "options":
        body["leyline"] = "DEEP"
    elif where == "context":
        body["context_management"] = "DEEP"
    else:
        body[where] = "DEEP"
    return json.dumps(body).replace('"DEEP"', deep)


@pytest.mark.parametrize("depth", [150, 400, 700, 900, 980, 1100, 200_000])
@pytest.mark.parametrize("array", [True, False])
async def test_depth_is_never_the_proxys_failure(
    engine: FakeEngine, depth: int, array: bool
) -> None:
    """A body of any nesting and depth is forwarded or a 400, on every route."""
    places = ("content", "arguments", "member", "tools", "options", "context", "metadata", "user")
    deep = nested(depth, array=array)
    async with proxy_before(engine, policy="truncate_older_than:n=1,max_chars=100") as client:
        for path in (CHAT, "/v1/completions", MESSAGES, "/v1/responses", COUNT):
            for where in places:
                answer = await client.post(path, content=placed(deep, where))
                assert answer.status_code in (200, 400, 501), (path, where, answer.text[:300])
                if answer.status_code == 400:
                    assert "error" in answer.json()
        whole = await client.post(CHAT, content=deep)
        assert whole.status_code == 400
        claims = await client.post("/v1/leyline/claims", content=deep)
        assert claims.status_code in (400, 413, 501)
        usual = await client.post(CHAT, json={"model": MODEL, "messages": [MESSAGE]})
        assert usual.status_code == 200


async def test_messages_are_counted(engine: FakeEngine) -> None:
    """One more than the tenant may send is refused; another tenant may send more."""
    keys = {"api_keys": ["red:kr", "blue:kb"], "max_messages": 5}
    own = {"blue": {"max_messages": 6}}
    body = {"model": MODEL, "messages": [MESSAGE] * 6, "max_tokens": 5}
    async with proxy_before(engine, tenants=own, **keys) as client:
        red = await client.post(CHAT, json=body, headers={"api-key": "kr"})
        claude = await client.post(MESSAGES, json=body, headers={"x-api-key": "kr"})
        blue = await client.post(CHAT, json=body, headers={"api-key": "kb"})
        fewer = await client.post(
            CHAT, json={**body, "messages": [MESSAGE] * 5}, headers={"api-key": "kr"}
        )
    error = red.json()["error"]
    assert (red.status_code, error["code"], error["param"]) == (
        400,
        "too_many_messages",
        "messages",
    )
    assert "limit is 5" in error["message"]
    assert (claude.status_code, claude.json()["type"]) == (400, "error")
    assert (blue.status_code, fewer.status_code) == (200, 200)


MANY = ",".join(["[]"] * 2000)
TEXT = MANY.replace(",", '\\",') * 40


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", MESSAGES, "/v1/responses", COUNT, "/v1/embeddings"]
)
async def test_values_are_counted_before_they_are_decoded(engine: FakeEngine, path: str) -> None:
    """A body with too many JSON values is a 400 with the limit and the fix, on every route; the
    same bytes as a text are none, and another tenant may send more."""
    keys = {"api_keys": ["red:kr", "blue:kb"], "max_body_values": 1024}
    own = {"blue": {"max_body_values": 20_000}}
    lists, text = f'"user":[{MANY}]', f'"user":"{TEXT}"'
    rest = json.dumps({"model": MODEL, "max_tokens": 1, "messages": [MESSAGE], "input": "Hi."})
    async with proxy_before(engine, tenants=own, **keys) as client:
        red, blue = {"api-key": "kr"}, {"api-key": "kb"}
        many = await client.post(path, content=f"{{{lists},{rest[1:]}", headers=red)
        written = await client.post(path, content=f"{{{text},{rest[1:]}", headers=red)
        allowed = await client.post(path, content=f"{{{lists},{rest[1:]}", headers=blue)
    assert many.status_code == 400
    assert "too_many_values" in many.text
    assert "1024" in many.text and "max_body_values" in many.text
    assert "too_many_values" not in written.text + allowed.text


@pytest.mark.parametrize("path", ["quarantine", "proof"])
async def test_values_of_other_bodies_are_counted(engine: FakeEngine, path: str) -> None:
    """The bodies of the proxy's own routes have the same bound."""
    many = ",".join(["[]"] * 150_000)
    async with proxy_before(engine) as client:
        answer = await client.post(f"/v1/leyline/sessions/s/{path}", content=f'{{"a":[{many}]}}')
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_values")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"])
async def test_values_in_other_encodings_are_counted(engine: FakeEngine, encoding: str) -> None:
    """A path that the proxy doesn't know passes no JSON that would have to be decoded to be judged,
    if it has too many values; what is no JSON passes."""
    path = "/v1/embeddings"
    async with proxy_before(engine, max_body_values=1024) as client:
        # In UTF-16, the sign's code has a byte that looks like a quotation mark.
        for content in (f"[{MANY}]", f'{{"a":[{MANY}]}}', f'["\u2230",{MANY}]'):
            answer = await client.post(path, content=content.encode(encoding))
            assert answer.status_code == 400, content[:10]
        few = await client.post(path, content='{"a":[]}'.encode(encoding))
        audio = await client.post(path, content=b"RIFF" + b'[{",' * 2000)
    assert few.status_code != 400 and audio.status_code != 400


@pytest.mark.parametrize("calls", [1, 40])
async def test_values_within_arguments_are_counted(engine: FakeEngine, calls: int) -> None:
    """Arguments are JSON that a template may want decoded: all of a request's together have the
    bound of a body, whether one of them is no JSON or not; a long text within them is one value."""
    each = f'{{"a":[{",".join(["[]"] * (3000 // calls))}]}}'

    def chat(arguments: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        made = [{"id": f"c{n}", "type": "function", "function": function} for n in range(calls)]
        broken = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '"' * 601}}
        return {
            "model": MODEL,
            "messages": [
                MESSAGE,
                {"role": "assistant", "content": None, "tool_calls": [broken, *made]},
            ],
        }

    async with proxy_before(engine, max_body_values=2048) as client:
        many = await client.post(CHAT, json=chat(each))
        written = await client.post(CHAT, json=chat(json.dumps({"content": each * 2})))
    error = many.json()["error"]
    assert (many.status_code, error["code"]) == (400, "too_many_values")
    assert error["param"] == "messages[1].tool_calls"
    assert written.status_code == 200


async def test_sizes_are_each_tenants_own(engine: FakeEngine) -> None:
    """A body too large for one tenant is another's ordinary one."""
    keys = {"api_keys": ["red:kr", "blue:kb"], "max_body_bytes": 1024}
    own = {"blue": {"max_body_bytes": 100_000}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a" * 2000}]}
    async with proxy_before(engine, tenants=own, **keys) as client:
        red = await client.post(CHAT, json=body, headers={"api-key": "kr"})
        counted = await client.post(COUNT, json=body, headers={"api-key": "kr"})
        blue = await client.post(CHAT, json=body, headers={"api-key": "kb"})
    assert (red.status_code, counted.status_code, blue.status_code) == (413, 413, 200)
    assert red.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", CHAT, 405),
        ("DELETE", "/v1/leyline/sessions", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/leyline/nothing", 404),
        ("GET", "/nothing", 404),
        ("GET", "/admin/tenants", 404),
        ("POST", "/admin/reload", 404),
        ("GET", MESSAGES, 405),
        ("GET", f"{MESSAGES}/batches", 404),
        ("POST", f"{MESSAGES}/nothing", 404),
    ],
)
async def test_unknown_paths_have_the_shape_of_their_api(
    engine: FakeEngine, method: str, path: str, expected: int
) -> None:
    """OpenAI's, and Anthropic's below /v1/messages."""
    async with proxy_before(engine, pass_through="off") as client:
        answer = await client.request(method, path)
    document = answer.json()
    assert answer.status_code in (404, expected)
    if path.startswith(MESSAGES):
        assert (document["type"], document["error"]["type"]) in [
            ("error", "not_found_error"),
            ("error", "invalid_request_error"),
        ]
        assert answer.headers["request-id"] == document["request_id"]
    else:
        assert {"message", "type", "param", "code"} <= document["error"].keys()
