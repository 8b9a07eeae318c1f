"""Bad input against the whole stack: never a hang, a traceback or a lost session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.stack import embedded_stack

from leyline_policies import function_policy

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "Hi."}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A bare HTTP client of a whole stack."""
    options = {"pool_tokens": 32_768, "device": "cpu"}
    with (
        embedded_stack(options, max_body_bytes=12 * 1024 * 1024, log_level="error") as origin,
        httpx.Client(base_url=origin, timeout=60, headers=JSON) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def model(client: httpx.Client) -> str:
    """The served model."""
    name: str = client.get("/v1/models").json()["data"][0]["id"]
    return name


def refused(client: httpx.Client, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a request that must fail, shaped as OpenAI does."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.post(CHAT, content=content, **options)
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return response.status_code, error


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"model": "x",}', b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000]
)
def test_malformed_json(client: httpx.Client, content: bytes) -> None:
    """A body that is no JSON object gets a 400 that says so."""
    status, error = refused(client, content)
    assert (status, error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"messages": "Hi."}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["Hi."]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "Hi."}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"model": 7}, "model"),
        ({"model": None}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"leyline": []}, "leyline"),
        ({"leyline": {"undeclared": {"tool": "maybe"}}}, "leyline.undeclared.tool"),
        ({"leyline": {"edits": [{"message": 9, "drop": True}]}}, "leyline.edits[0].message"),
        ({"leyline": {"edits": [{"message": 0, "chars": [5, 2], "replacement": ""}]}},
         "leyline.edits[0].chars"),
        ({"leyline": {"edits": [{"message": 0, "chars": [0, 99], "replacement": "",
                                 "mode": "forget"}]}}, "leyline.edits[0].chars"),
        ({"messages": [{**USER, "leyline": {"forget": True}}]}, "messages[0].leyline.forget"),
        ({"leyline": {"policy": "truncate_older_then:n=2"}}, "leyline.policy"),
        ({"leyline": {"policy": "truncate_older_than:n=many"}}, "leyline.policy"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(
    client: httpx.Client, model: str, members: dict[str, Any], param: str
) -> None:
    """Each wrong field is a 400 whose ``param`` is that field."""
    status, error = refused(client, {"model": model, "messages": [USER], **members})
    assert status == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_unknown_names_bring_the_closest(client: httpx.Client, model: str) -> None:
    """A mistyped model or policy is answered with the name that was meant."""
    status, error = refused(client, {"model": model[:-1], "messages": [USER]})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert model in error["message"]
    body = {"model": model, "messages": [USER], "leyline": {"policy": "redactt:pattern=x"}}
    _, error = refused(client, body)
    assert "'redact'" in error["message"]


@pytest.mark.nightly
def test_large_bodies(client: httpx.Client, model: str) -> None:
    """A 10 MB message is the engine's to refuse, by its context; beyond the limit it's a 413."""
    message = {"role": "user", "content": "word " * 2_000_000}
    status, error = refused(client, {"model": model, "messages": [message]})
    assert status == 400
    assert error["message"]
    status, error = refused(client, b" " * (12 * 1024 * 1024 + 1))
    assert (status, error["code"]) == (413, "request_too_large")


def test_other_encodings_are_refused_in_words(client: httpx.Client) -> None:
    """A content encoding is named, not taken for broken JSON, and so are those that are read."""
    for encoding, expected in (("br", 415), ("gzip", 400)):
        status, error = refused(client, b"x", headers={"content-encoding": encoding})
        assert (status, error["param"]) == (expected, "content-encoding")
    assert (
        "gzip, zstd, deflate"
        in refused(client, b"x", headers={"content-encoding": "br"})[1]["message"]
    )


def test_a_bad_request_loses_no_session(client: httpx.Client, model: str) -> None:
    """After any refusal the session continues where it was."""
    headers = {"x-leyline-session": "kept"}
    good = {"model": model, "messages": [USER], "max_tokens": 1}
    assert client.post(CHAT, json=good, headers=headers).status_code == 200
    for bad in ({"stream": 7}, {"max_tokens": "many"}, {"leyline": {"no": 1}}):
        refused(client, {**good, **bad}, headers=headers)
    after = client.post(CHAT, json=good, headers=headers)
    assert after.json()["leyline"]["turn_index"] == 1


def test_a_failing_policy_costs_only_its_edits() -> None:
    """One that raises, hangs, or breaks a rule is skipped; receipt and metric say so."""

    @function_policy(name="raises")
    def raises(messages: list[Any], turn_idx: int) -> list[Any]:
        raise RuntimeError("secret words")

    @function_policy(name="nonsense")
    def nonsense(messages: list[Any], turn_idx: int) -> list[Any]:
        return [1, 2]

    @function_policy(name="hangs")
    def hangs(messages: list[Any], turn_idx: int) -> list[Any]:
        while True:
            pass

    @function_policy(name="mutates")
    def mutates(messages: list[Any], turn_idx: int) -> list[Any]:
        messages[0]["content"] = "something else"
        return messages

    @function_policy(name="drops")
    def drops(messages: list[Any], turn_idx: int) -> list[Any]:
        return [{"role": "system", "content": "nobody asks"}]

    options = {"device": "cpu"}
    policies = (raises, nonsense, hangs, mutates, drops)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leyline_proxy.tenants.tenant.load_pipeline", lambda _: policies)
        with (
            embedded_stack(
                options, policy="patched", policy_timeout_s=0.2, log_level="error"
            ) as origin,
            httpx.Client(base_url=origin, timeout=60) as http,
        ):
            name = http.get("/v1/models").json()["data"][0]["id"]
            body = {"model": name, "messages": [USER], "max_tokens": 1}
            answer = http.post(CHAT, json=body)
            metrics = http.get("/metrics").text
    assert answer.status_code == 200
    faults = answer.json()["leyline"]["policy_faults"]
    assert [(item["policy"], item["fault"]) for item in faults] == [
        ("raises", "raised"),
        ("nonsense", "bad_type"),
        ("hangs", "timed_out"),
        ("mutates", "mutated"),
        ("drops", "lost_last_user"),
    ]
    assert "secret words" not in answer.text
    assert 'leyline_policy_faults_total{fault="raised",policy="raises"} 1.0' in metrics
