"""Claims through the proxy on a real vLLM: their life, refusals whole and streamed, and tenants."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.sglang_stack import Proxies

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "tests" / "vllm" / "support"))

from vllm_server import BLOCK, VllmServer  # noqa: E402 - beside the plugin's own tests

CHAT, CLAIMS = "/v1/chat/completions", "/v1/leyline/claims"
MODEL, POOL = "leyline-random", 159 * BLOCK
RED, BLUE = "key-of-the-red-tenant", "key-of-the-blue-tenant"
PLAN = "The plan is to find where the cache loses tokens, and to mend it there. "
LOG = "Here is all of the log that the build left behind, line by line. "
CLAIMED, LARGE = 2000, POOL - 1500
"""Tokens of the claimed prompt, and of one that doesn't fit beside it."""


pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def origin(engine: VllmServer) -> Iterator[str]:
    """A proxy for two tenants in front of vLLM."""
    keys = [f"red:{RED}", f"blue:{BLUE}"]
    with Proxies() as proxies:
        yield proxies.start(engine.base_url, api_keys=keys, claims_interval_s=0.2)


@pytest.fixture(scope="module")
def red(origin: str) -> Iterator[httpx.Client]:
    """The tenant that claims."""
    with client(origin, RED) as http:
        yield http


@pytest.fixture(scope="module")
def blue(origin: str) -> Iterator[httpx.Client]:
    """Another one."""
    with client(origin, BLUE) as http:
        yield http


def client(origin: str, key: str) -> httpx.Client:
    """A tenant's client."""
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=origin, timeout=120, headers=headers)


def ask(http: httpx.Client, session: str, text: str, **members: Any) -> httpx.Response:
    """One turn of a session with this message."""
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0, **members}
    return http.post(CHAT, json=body, headers={"x-leyline-session": session})


def tokens(http: httpx.Client, text: str) -> int:
    """The length of a prompt with this message."""
    answer = ask(http, f"measured {len(text)}", text, max_tokens=1).raise_for_status()
    return int(answer.json()["usage"]["prompt_tokens"])


@pytest.fixture(scope="module")
def rate(red: httpx.Client) -> float:
    """Tokens per character of these texts."""
    return (tokens(red, PLAN * 4) - tokens(red, PLAN)) / (3 * len(PLAN))


def sized(text: str, wanted: int, rate: float) -> str:
    """The text repeated to about so many tokens."""
    return text * int(wanted / rate / len(text))


def claim(http: httpx.Client, session: str, **terms: Any) -> dict[str, Any]:
    """A claim over a session's first message."""
    body = {"session": session, "kind": "hard", "predicate": {"messages": [0, 1]}, **terms}
    answer = http.post(CLAIMS, json=body)
    assert answer.status_code == 201, answer.text
    document: dict[str, Any] = answer.json()
    return document


@pytest.fixture
def held(red: httpx.Client, rate: float, request: pytest.FixtureRequest) -> Iterator[str]:
    """The id of a claim of the red tenant over a long prompt; released in the end."""
    name = f"of-{request.node.originalname}"
    ask(red, name, sized(PLAN, CLAIMED, rate)).raise_for_status()
    state = claim(red, name, id=name, ttl_s=60)
    assert state["state"] == "materialized"
    assert state["resident_tokens"] >= state["required_tokens"] > CLAIMED / 2
    yield name
    red.delete(f"{CLAIMS}/{name}")


def test_what_cannot_fit_is_refused_with_the_claims_name(
    red: httpx.Client, held: str, rate: float
) -> None:
    """503 in the API's own shape while the claim lives; the answer once it is released."""
    large = sized(LOG, LARGE, rate)
    refused = ask(red, "logs", large)
    assert refused.status_code == 503, refused.text
    error = refused.json()["error"]
    assert (error["code"], error["claims"], error["other_claims"]) == (
        "refused_by_claim",
        [held],
        0,
    )
    assert 0 < int(refused.headers["retry-after"]) <= 60
    again = ask(red, held, sized(PLAN, CLAIMED, rate)).raise_for_status().json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > CLAIMED / 2
    shown = red.get(f"{CLAIMS}/{held}").json()
    assert (shown["hits"], shown["pressure"] >= 1) == (1, True)
    assert red.delete(f"{CLAIMS}/{held}").json()["state"] == "released"
    ask(red, "logs", large).raise_for_status()
    kinds = [event["event"] for event in red.get(f"{CLAIMS}/{held}/events").json()["events"]]
    assert kinds == ["claim_requested", "entered", "found", "locked", "released", "unlocked"]


def test_a_stream_is_refused_before_it_begins(red: httpx.Client, held: str, rate: float) -> None:
    """vLLM's stream has begun by then, but the client's hasn't: it gets status and claim."""
    refused = ask(red, "streamed", sized(LOG, LARGE, rate), stream=True)
    assert refused.status_code == 503, refused.text
    error = refused.json()["error"]
    assert (error["code"], error["claims"]) == ("refused_by_claim", [held])
    assert 0 < int(refused.headers["retry-after"]) <= 60


def test_another_tenant_learns_only_the_number(blue: httpx.Client, held: str, rate: float) -> None:
    """Its refusal counts claims without their names, and it finds none of them."""
    refused = ask(blue, "logs", sized(LOG, LARGE, rate))
    assert refused.status_code == 503, refused.text
    error = refused.json()["error"]
    assert (error["claims"], error["other_claims"]) == ([], 1)
    assert held not in refused.text
    assert blue.get(CLAIMS).json()["claims"] == []
    for answer in (blue.get(f"{CLAIMS}/{held}"), blue.delete(f"{CLAIMS}/{held}")):
        assert answer.status_code == 404


def test_a_claim_ends_by_itself(red: httpx.Client, rate: float) -> None:
    """After its time the large prompt runs, and the proxy's metrics have counted the refusal."""
    ask(red, "short", sized(PLAN, CLAIMED, rate)).raise_for_status()
    claim(red, "short", id="short", ttl_s=2)
    assert ask(red, "later", sized(LOG, LARGE, rate)).status_code == 503
    time.sleep(2.5)
    ask(red, "later", sized(LOG, LARGE, rate)).raise_for_status()
    assert red.get(f"{CLAIMS}/short").json()["state"] == "expired"
    text = red.get("/metrics").text
    assert any(
        line.startswith("leyline_claim_refusals_total") and not line.endswith(" 0.0")
        for line in text.splitlines()
    ), [line for line in text.splitlines() if "claim" in line and not line.startswith("#")]
