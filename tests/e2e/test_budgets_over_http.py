"""Budgets with the real engine: whole and streamed answers, clients that leave, two workers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.agent_history import agent_history
from support.redis_server import redis_server
from support.stack import embedded_stack
from support.waiting import wait
from support.worker_fleet import fleet

CHAT = "/v1/chat/completions"
MODEL = "leyline-recall"
ENGINE = {"pool_tokens": 32_768, "device": "cpu"}
PRICE = {"currency": "EUR", "prefilled": 4.0, "cached": 0.5, "generated": 16.0}
RED = {"authorization": "Bearer key-of-the-red-tenant"}
BLUE = {"authorization": "Bearer key-of-the-blue-tenant"}
KEYS = ["red:key-of-the-red-tenant", "blue:key-of-the-blue-tenant"]
BODY = {"model": MODEL, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    """A proxy that splices, for a tenant with budgets of both units and one without."""
    red = {"budgets": [{"window": "month", "tokens": 10**6, "money": 10.0}]}
    settings = {
        "api_keys": KEYS,
        "prices": {"default": PRICE},
        "policy": "truncate_older_than:n=2,max_chars=60",
        "tenants": {"red": red},
        "log_level": "error",
    }
    with embedded_stack(ENGINE, **settings) as origin, httpx.Client(base_url=origin) as found:
        found.timeout = httpx.Timeout(60)
        yield found


def used(client: httpx.Client, unit: str) -> tuple[float, float]:
    """Amounts that the tenant red has used, and that it holds."""
    found = client.get("/v1/leyline/budgets", headers=RED).json()["budgets"]
    (budget,) = [each for each in found if each["unit"] == unit]
    return budget["used"], budget["reserved"]


def cost(answer: dict[str, Any]) -> tuple[int, float]:
    """The tokens of an answer, and its price by the receipt, independently of the proxy's code."""
    tokens, generated = answer["leyline"]["tokens"], answer["usage"]["completion_tokens"]
    served = tokens["prefix"] + tokens["spliced"] + tokens["reused"]
    money = tokens["prefilled"] * 4.0 + served * 0.5 + generated * 16.0
    return tokens["prompt"] + generated, money / 1_000_000


def streamed(text: str) -> dict[str, Any]:
    """The usage and the account in a stream's events."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            found |= {name: chunk[name] for name in ("usage", "leyline") if chunk.get(name)}
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_sessions_turns_cost_what_their_receipts_say(client: httpx.Client, stream: bool) -> None:
    """Prefilled, spliced and cached tokens at their prices, at the end of each answer."""
    tokens = money = spliced = 0.0
    for turn in range(1, 6):
        body = {**BODY, "messages": agent_history(turn, "Begin.", secret="x", lines=40)}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {**RED, "x-leyline-session": "paid"}
        answer = client.post(CHAT, json=body, headers=headers)
        document = streamed(answer.text) if stream else answer.json()
        spent = cost(document)
        tokens, money = tokens + spent[0], money + spent[1]
        spliced += document["leyline"]["tokens"]["spliced"]
        assert used(client, "tokens") == (tokens, 0)
        assert used(client, "money") == pytest.approx((money, 0))
    assert spliced > 0


def test_a_stream_that_its_client_leaves_is_charged(client: httpx.Client) -> None:
    """The prompt and the tokens that came, fewer than the answer would have had."""
    body = {**BODY, "messages": [{"role": "user", "content": "Begin."}], "stream": True}
    whole = client.post(CHAT, json={**body, "stream": False}, headers=RED).json()
    before, prompt = used(client, "tokens")[0], whole["usage"]["prompt_tokens"]
    long = {**body, "max_tokens": 2000}
    with client.stream("POST", CHAT, json=long, headers=RED) as answer:
        lines = answer.iter_lines()
        while "content" not in next(lines):
            pass
    wait(lambda: used(client, "tokens")[1] == 0)
    charged = used(client, "tokens")[0] - before
    assert prompt < charged < prompt + 2000
    metrics = client.get("/metrics").text
    assert 'leyline_budget_estimates_total{reason="left"} 1.0' in metrics


@pytest.mark.parametrize("store", [pytest.param("memory", marks=pytest.mark.nightly), "redis"])
def test_a_worker_that_dies_mid_stream_is_charged(tmp_path: Path, store: str) -> None:
    """The other worker charges what its request held, wherever usage is counted."""
    with ExitStack() as stack:
        config = tmp_path / "leyline.yaml"
        settings: dict[str, Any] = {
            "api_keys": KEYS,
            "budgets": [{"window": "month", "tokens": 100_000}],
            "engine_options": {"pool_tokens": 32_768, "device": "cpu"},
        }
        if store == "redis":
            redis = stack.enter_context(redis_server(tmp_path))
            settings |= {"session_store": redis.url, "budget_store": "redis"}
            settings["session_secret"] = ["a secret of sixteen characters or more"]
        config.write_text(json.dumps(settings))
        two = stack.enter_context(fleet(tmp_path, "--config", str(config)))
        first, second = stack.enter_context(two.clients())
        body = {**BODY, "messages": [{"role": "user", "content": "Begin."}], "max_tokens": 3000}
        with (
            suppress(httpx.HTTPError),
            first.stream("POST", CHAT, json={**body, "stream": True}, headers=RED) as answer,
        ):
            assert answer.status_code == httpx.codes.OK
            lines = answer.iter_lines()
            next(lines)
            used_before, held = used(second, "tokens")
            os.kill(two.pids()[0], signal.SIGKILL)
            for _ in lines:
                pass
        assert used_before == 0 and held > 3000
        wait(lambda: used(second, "tokens") == (held, 0))
        counted = second.get("/metrics").text
        assert 'leyline_budget_estimates_total{reason="died"} 1.0' in counted
        assert used(second, "tokens") == (held, 0)


def test_two_workers_share_a_budget(tmp_path: Path) -> None:
    """One worker refuses when the other has used it up; a tenant without a budget is served."""
    config = tmp_path / "leyline.yaml"
    config.write_text(
        json.dumps(
            {
                "api_keys": KEYS,
                "budget_answer_tokens": 4,
                "tenants": {"red": {"budgets": [{"window": "month", "tokens": 120}]}},
            }
        )
    )
    body = {**BODY, "messages": [{"role": "user", "content": "Begin."}]}
    with fleet(tmp_path, "--config", str(config)) as running, running.clients() as workers:
        spent, codes = 0, []
        for number in range(12):
            answer = workers[number % 2].post(CHAT, json=body, headers=RED)
            codes.append(answer.status_code)
            if answer.status_code == 200:
                spent += sum(cost(answer.json())[:1])
        states = [used(worker, "tokens") for worker in workers]
        other = workers[0].post(CHAT, json=body, headers=BLUE)
    assert codes == sorted(codes)
    assert set(codes) == {200, 429}
    assert states == [(spent, 0)] * 2
    assert spent <= 120
    assert other.status_code == 200
