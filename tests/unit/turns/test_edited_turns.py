"""Turns whose edits cost no cached token: how answers, headers and metrics report them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.fake_engine import CAPABILITY, MODEL, FakeEngine, chat_json, proxy_before, tool_session
from support.metrics_page import samples

from leyline_engine.contract import Capability

CHAT = "/v1/chat/completions"
MASK = "last_n_observations:n=1"
CAUSE = "policy:last_n_observations"

ENGINES = pytest.mark.parametrize("capability", [CAPABILITY, None], ids=["receipts", "plain"])


async def ask(client: httpx.AsyncClient, messages: list[dict[str, Any]], **options: Any) -> Any:
    """One turn of a session."""
    body = {"model": MODEL, "messages": messages, "leyline": options}
    answer = await client.post(CHAT, json=body, headers={"x-leyline-session": "s"})
    answer.raise_for_status()
    return answer


async def counted(client: httpx.AsyncClient, name: str) -> dict[tuple[str, ...], float]:
    """Samples above 0 of a counter, by outcome, and reason or mode."""
    names = ("outcome", "reason", "mode")
    return {
        tuple(sample.labels[each] for each in names if each in sample.labels): sample.value
        for sample in await samples(client, name)
        if sample.value
    }


@ENGINES
async def test_a_first_turn_that_a_policy_cut_is_no_unedited_one(
    capability: Capability | None,
) -> None:
    """The answer lists each edit, and neither it nor the metrics call any of them a fallback."""
    engine = FakeEngine(capability=capability)
    engine.answers = [chat_json()]
    async with proxy_before(engine) as client:
        answer = await ask(client, tool_session(3), policy=MASK)
        turns = await counted(client, "leyline_turns_total")
        edits = await counted(client, "leyline_edits_total")
    account = answer.json()["leyline"]
    assert engine.sent["messages"] != tool_session(3)
    assert answer.headers["x-leyline-outcome"] == account["outcome"] == "edited"
    assert (account["planned"], account["reason"]) == ("edited", "nothing_cached")
    assert [
        (edit["message"], edit["cause"], edit["mode"], edit["span"], edit["cached"])
        for edit in account["edits"]
    ] == [(2, CAUSE, "amortize", None, False), (4, CAUSE, "amortize", None, False)]
    assert account["standing"] == []
    assert turns == {("edited", "nothing_cached"): 1.0}
    assert edits == {("nothing_cached", "amortize"): 2.0}


async def test_edits_of_earlier_turns_stand() -> None:
    """A turn that only repeats what earlier turns edited says so, and counts no edit again."""
    engine = FakeEngine(capability=None)
    engine.answers = [chat_json(), chat_json()]
    async with proxy_before(engine) as client:
        await ask(client, tool_session(3), policy=MASK)
        # The same results, and a question more.
        grown = [*tool_session(3), {"role": "user", "content": "And now?"}]
        account = (await ask(client, grown, policy=MASK)).json()["leyline"]
        turns = await counted(client, "leyline_turns_total")
        edits = await counted(client, "leyline_edits_total")
    assert (account["outcome"], account["reason"], account["edits"]) == ("edited", "standing", [])
    assert account["standing"] == [{"cause": CAUSE, "mode": "amortize", "messages": 2}]
    assert turns == {("edited", "nothing_cached"): 1.0, ("edited", "standing"): 1.0}
    assert edits == {("nothing_cached", "amortize"): 2.0}


@ENGINES
async def test_a_list_that_goes_out_as_it_came_is_unedited(capability: Capability | None) -> None:
    """A policy that finds nothing to edit leaves the turn unedited."""
    engine = FakeEngine(capability=capability)
    engine.answers = [chat_json()]
    async with proxy_before(engine) as client:
        account = (await ask(client, tool_session(1), policy=MASK)).json()["leyline"]
    assert engine.sent["messages"] == tool_session(1)
    assert (account["outcome"], account["reason"]) == ("unedited", None)
    assert (account["edits"], account["standing"]) == ([], [])


async def test_a_session_document_keeps_such_edits() -> None:
    """The history that people look at later shows the same account as the answer."""
    engine = FakeEngine()
    engine.answers = [chat_json()]
    async with proxy_before(engine) as client:
        account = (await ask(client, tool_session(3), policy=MASK)).json()["leyline"]
        document = (await client.get("/v1/leyline/sessions/s")).json()
    (turn,) = document["history"]
    assert (turn["planned"], turn["edits"]) == ("edited", account["edits"])
    assert turn["receipt"]["outcome"] == "edited"
