"""Claims against the whole stack: proxy, embedded engine, and a client that knows neither."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.stack import embedded_stack

CHAT, CLAIMS = "/v1/chat/completions", "/v1/leyline/claims"
POOL = 4096
PLAN = "The plan is to find where the cache loses tokens, and to mend it there. " * 40
LARGE = "Here is all of the log that the build left behind, line by line. " * 170


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A bare HTTP client of a whole stack with a small pool, all of which may be claimed."""
    limits = {"share": 1.0, "engine_share": 1.0}
    options = {"pool_tokens": POOL, "device": "cpu", "claim_limits": limits}
    with (
        embedded_stack(options, log_level="error", claims_interval_s=0.2) as origin,
        httpx.Client(base_url=origin, timeout=60) as http,
    ):
        yield http


def ask(client: httpx.Client, session: str, *texts: str, **members: Any) -> httpx.Response:
    """One turn; the texts are the user's and the model's, in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": messages, "max_tokens": 2} | members
    return client.post(CHAT, json=body, headers={"x-leyline-session": session})


def claim(client: httpx.Client, session: str, **terms: Any) -> dict[str, Any]:
    """A hard claim over a session's first message."""
    body = {"session": session, "kind": "hard", "predicate": {"messages": [0, 1]}} | terms
    answer = client.post(CLAIMS, json=body)
    assert answer.status_code == 201, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_a_claimed_message_stays_and_what_cannot_fit_is_told(client: httpx.Client) -> None:
    """The large request is refused with the claim's id, is served when it has gone, and until then
    the claimed message is a cache hit."""
    assert ask(client, "plans", PLAN).status_code == 200
    held = claim(client, "plans", id="plan", reason="the plan")
    assert held["state"] == "materialized"
    assert held["resident_tokens"] >= held["required_tokens"] > 500

    refused = ask(client, "logs", LARGE)
    assert refused.status_code == 503
    error = refused.json()["error"]
    assert (error["code"], error["claims"], error["other_claims"]) == (
        "refused_by_claim",
        ["plan"],
        0,
    )
    assert "retry-after" not in refused.headers

    again = ask(client, "plans", PLAN, "Go on.", "And then?").json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= held["required_tokens"]
    shown = client.get(f"{CLAIMS}/plan").json()
    assert (shown["hits"], shown["pressure"] >= 1) == (1, True)

    assert client.delete(f"{CLAIMS}/plan").json()["state"] == "released"
    assert ask(client, "logs", LARGE).status_code == 200
    kinds = [event["event"] for event in client.get(f"{CLAIMS}/plan/events").json()["events"]]
    assert kinds == ["claim_requested", "entered", "found", "locked", "released", "unlocked"]


def test_a_stream_is_refused_before_it_begins(client: httpx.Client) -> None:
    """The refusal has a status, and the seconds after which the claim will have expired."""
    assert ask(client, "streamed", PLAN).status_code == 200
    claim(client, "streamed", id="for-a-while", ttl_s=30)
    refused = ask(client, "streamed-logs", LARGE, stream=True)
    assert refused.status_code == 503
    assert refused.json()["error"]["claims"] == ["for-a-while"]
    assert 0 < int(refused.headers["retry-after"]) <= 30
    client.delete(f"{CLAIMS}/for-a-while")


def test_a_pinned_message_is_claimed_and_let_go(client: httpx.Client) -> None:
    """The pin of a turn becomes a claim; the first turn without it releases the claim."""

    def pinned(text: str, *others: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": text, "leyline": {"pin": True}}, *others]

    def live(wanted: int) -> list[dict[str, Any]]:
        for _ in range(100):
            found = client.get(CLAIMS, params={"session": "pins"}).json()["claims"]
            if len(found) == wanted:
                return list(found)
            time.sleep(0.05)
        raise AssertionError(f"not {wanted} but {found}")

    assert ask(client, "pins", messages=pinned(PLAN)).status_code == 200
    (made,) = live(1)
    assert (made["kind"], made["priority"], made["state"]) == ("soft", 50, "materialized")
    others = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
    plain = [{"role": "user", "content": PLAN}, *others]
    assert ask(client, "pins", messages=plain).status_code == 200
    live(0)
