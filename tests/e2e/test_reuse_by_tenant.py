"""Content that two agents of a tenant have at different places, as each tenant's setting has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.stack import embedded_stack

CHAT = "/v1/chat/completions"
FILE = "".join(
    f"def handler_{n}(request):\n    return answer({n * 7919 % 1000})\n" for n in range(20)
)
TENANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "watching": {"reuse": "observe"},
    "reusing": {"reuse": "live"},
    "fixed": {"reuse": "observe", "allow_request_policy": False},
    "red": {"reuse": "live", "reuse_groups": ["docs"]},
    "blue": {"reuse": "live", "reuse_groups": ["docs", "more"]},
    "silent": {"reuse": "off", "reuse_groups": ["docs"]},
    "doubting": {"reuse": "live", "reuse_margin": 100},
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A bare HTTP client of a stack whose tenants reuse differently."""
    tenants = {name: {"api_keys": [f"key-{name}"], **own} for name, own in TENANTS.items()}
    settings = {"log_level": "error", "tenants": tenants}
    with (
        embedded_stack({"pool_tokens": 65_536, "device": "cpu"}, **settings) as origin,
        httpx.Client(base_url=origin, timeout=120) as http,
    ):
        yield http


def post(
    client: httpx.Client,
    tenant: str,
    session: str,
    *,
    clock: str = "",
    file: str = FILE,
    **options: Any,
) -> httpx.Response:
    """An agent's turn that has read the file, after a task of its own."""
    calls = [{"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"{clock}You are an agent that reads code. " * 3},
        {"role": "user", "content": f"Task {session}: " + "look at it. " * len(session)},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": file},
    ]
    body = {"model": "leyline-recall", "messages": messages, "max_tokens": 2, "leyline": options}
    headers = {"authorization": f"Bearer key-{tenant}", "x-leyline-session": session}
    return client.post(CHAT, json=body, headers=headers)


def account(client: httpx.Client, tenant: str, session: str, **options: Any) -> dict[str, Any]:
    """The account of an answered turn, whose tokens add up."""
    answer = post(client, tenant, session, **options)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["leyline"]
    tokens = found["tokens"]
    served = tokens["prefix"] + tokens["spliced"] + tokens["reused"]
    assert served + tokens["prefilled"] == tokens["prompt"]
    assert answer.headers["x-leyline-reused-tokens"] == str(tokens["reused"])
    return found


def test_a_tenant_that_reuses_gets_the_file_once(client: httpx.Client) -> None:
    """The second agent's file is copied, and its next turn has all of it as a prefix."""
    assert account(client, "reusing", "one")["reuse"]["mode"] == "live"
    second = account(client, "reusing", "second")
    assert second["outcome"] == "unedited"
    assert second["reuse"]["tenant"] == second["tokens"]["reused"] > 200
    again = account(client, "reusing", "second")
    assert again["tokens"]["prefix"] == again["tokens"]["prompt"] - 1


def test_a_tenant_that_observes_sees_what_it_would_get(client: httpx.Client) -> None:
    """It is counted, in the receipt and as a series, and nothing is copied."""
    account(client, "watching", "one")
    second = account(client, "watching", "second")
    assert second["tokens"]["reused"] == 0
    assert second["reuse"]["tenant"] > 200
    assert second["lineage"] is None
    series = 'leyline_reuse_tokens_total{kind="tenant",mode="observe",model="leyline-recall"'
    assert series in client.get("/metrics", headers={"authorization": "Bearer key-watching"}).text


def test_reuse_is_off_unless_it_is_asked_for(client: httpx.Client) -> None:
    """The default looks for nothing, a request may, and one may refuse what its tenant has."""
    account(client, "plain", "one")
    assert account(client, "plain", "second")["reuse"] is None
    assert account(client, "plain", "third", reuse="live")["reuse"]["mode"] == "live"
    assert account(client, "plain", "fourth", reuse="live")["tokens"]["reused"] > 200
    assert account(client, "reusing", "third", reuse="off")["reuse"] is None


def test_an_operator_may_fix_it(client: httpx.Client) -> None:
    """A tenant without a choice gets 403, which names the field; a wrong word gets 400."""
    refused = post(client, "fixed", "one", reuse="live")
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "leyline.reuse")
    wrong = post(client, "plain", "one", reuse="always")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "leyline.reuse")


def report(seed: int) -> str:
    """A file that no other test sends."""
    return "".join(f"the {n * seed % 1000}th line of a report\n" for n in range(60))


def test_a_group_s_file_is_computed_once(client: httpx.Client) -> None:
    """One tenant's file is copied for the other, and counted apart; nobody else gets it."""
    assert account(client, "red", "report", file=report(7919))["tokens"]["reused"] == 0
    taken = account(client, "blue", "report!", clock="It is late. ", file=report(7919))
    assert taken["reuse"]["group"] == taken["tokens"]["reused"] > 200
    outside = account(client, "reusing", "report?", clock="It is early. ", file=report(7919))
    assert outside["reuse"]["group"] == 0


@pytest.mark.parametrize(
    ("giver", "options"),
    [("silent", {}), ("red", {"reuse_groups": []}), ("blue", {"reuse_groups": ["more"]})],
)
def test_a_turn_may_stay_out_of_a_group(
    client: httpx.Client, giver: str, options: dict[str, Any]
) -> None:
    """A tenant that doesn't reuse offers nothing, and nor does a request that leaves the group."""
    text = report(100 + len(giver))
    account(client, giver, "apart", file=text, **options)
    taker = "blue" if giver == "red" else "red"
    taken = account(client, taker, f"from-{giver}", clock="It is late. ", file=text)
    assert taken["reuse"]["group"] < 100  # the system prompt is older


def test_a_request_can_not_enter_a_group(client: httpx.Client) -> None:
    """Groups are the operator's; a request that names another one gets 403."""
    refused = post(client, "red", "x", reuse_groups=["docs", "more"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "leyline.reuse_groups")
    wrong = post(client, "red", "x", reuse_groups=["not a name"])
    assert wrong.status_code == 400


def test_a_tenant_that_doubts_gets_a_plain_prefill(client: httpx.Client) -> None:
    """A margin that no first token has gives reuse up; the receipt and a series say so, and a
    request may choose otherwise."""
    account(client, "doubting", "doubter")
    second = account(client, "doubting", "its colleague")
    assert (second["tokens"]["reused"], second["lineage"]) == (0, None)
    assert second["reuse"]["gated"] is True
    assert 0 < second["reuse"]["margin"] < 100
    series = 'leyline_reuse_gated_total{model="leyline-recall",tenant="doubting"} 1.0'
    headers = {"authorization": "Bearer key-doubting"}
    assert series in client.get("/metrics", headers=headers).text
    trusting = account(client, "doubting", "one of many", reuse_margin=0)
    assert trusting["tokens"]["reused"] > 200
    assert (trusting["reuse"]["gated"], trusting["reuse"]["margin"]) == (False, None)
    measured = account(client, "doubting", "yet another", reuse_margin=0.000_001)
    assert measured["reuse"]["margin"] > 0
    for wrong in (-1, 100.5, "much"):
        refused = post(client, "doubting", "one", reuse_margin=wrong)
        expected = (400, "leyline.reuse_margin")
        assert (refused.status_code, refused.json()["error"]["param"]) == expected
    refused = post(client, "fixed", "one", reuse_margin=1)
    expected = (403, "leyline.reuse_margin")
    assert (refused.status_code, refused.json()["error"]["param"]) == expected


def test_a_clock_costs_the_clock(client: httpx.Client) -> None:
    """A new time in the system prompt is an undeclared, exact edit; what follows is found again."""
    account(client, "reusing", "clock", clock="It is 10:00. ")
    later = account(client, "reusing", "clock", clock="It is 10:05. ")
    assert later["edits"][0]["mode"] == "exact"
    assert later["tokens"]["reused"] > 200
    assert later["tokens"]["prefilled"] < 100
