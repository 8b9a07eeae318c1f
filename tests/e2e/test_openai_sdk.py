"""The whole stack as an agent sees it: the OpenAI SDK, a real server, a real engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, cast

import httpx
import openai
import pytest
from support.stack import embedded_stack

POLICY = "truncate_older_than:n=2,max_chars=80"
"""Edits from the third tool result on: the text after the first ones is new anyway."""
LISTING = "".join(f"{number:04d} drwxr-xr-x build/module_{number}\n" for number in range(40))
Conversation = list[dict[str, Any]]


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """Proxy and embedded engine; policies come with the requests."""
    options = {"pool_tokens": 65_536, "device": "cpu"}
    with embedded_stack(options, log_level="warning") as address:
        yield address


@pytest.fixture(scope="module")
def model(origin: str) -> str:
    """The served model."""
    name: str = httpx.get(f"{origin}/v1/models").json()["data"][0]["id"]
    return name


@pytest.fixture
def sdk(origin: str) -> Iterator[openai.OpenAI]:
    """A synchronous client."""
    with openai.OpenAI(base_url=f"{origin}/v1", api_key="none", max_retries=0) as client:
        yield client


def call(turn: int) -> dict[str, Any]:
    """An assistant message that calls a tool."""
    function = {"name": "shell", "arguments": json.dumps({"command": f"ls {turn}"})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{turn}", "type": "function", "function": function}],
    }


def conversation(turns: int, task: str) -> Conversation:
    """An agent's history after some tool calls, each with a long result."""
    messages: Conversation = [
        {"role": "system", "content": "You are an agent that looks into folders. " * 6},
        {"role": "user", "content": task},
    ]
    for turn in range(turns):
        messages.append(call(turn))
        output = f"{turn}\n{LISTING}"
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": output})
    return messages


def ask(
    sdk: openai.OpenAI, model: str, messages: Conversation, *, stream: bool, **options: Any
) -> dict[str, Any]:
    """One turn; the ``leyline`` member of its answer."""
    headers = options.pop("headers", {})
    answer: Any = sdk.chat.completions.create(
        model=model,
        messages=cast("Any", messages),
        max_tokens=2,
        temperature=0,
        stream=stream,
        extra_headers=headers,
        extra_body={"leyline": options},
    )
    if not stream:
        return cast("dict[str, Any]", answer.model_extra["leyline"])
    found = [chunk.model_extra["leyline"] for chunk in answer if "leyline" in chunk.model_extra]
    assert len(found) == 1
    return cast("dict[str, Any]", found[0])


def adds_up(account: dict[str, Any]) -> bool:
    """Prefix, spliced and prefilled tokens are the prompt's."""
    tokens = account["tokens"]
    prompt: int = tokens["prompt"]
    return prompt > 0 and prompt == tokens["prefix"] + tokens["spliced"] + tokens["prefilled"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_policy_is_spliced_turn_after_turn(sdk: openai.OpenAI, model: str, stream: bool) -> None:
    """Old tool output shrinks each turn, and the text after it is spliced, not prefilled."""
    headers = {"x-leyline-session": f"policy-{stream}"}
    task = f"Policy, streamed: {stream}."
    accounts = [
        ask(sdk, model, conversation(turn, task), stream=stream, policy=POLICY, headers=headers)
        for turn in range(1, 6)
    ]
    assert all(map(adds_up, accounts))
    assert {account["session"] for account in accounts} == {headers["x-leyline-session"]}
    assert [account["turn_index"] for account in accounts] == [0, 1, 2, 3, 4]
    for account in accounts[2:]:
        assert (account["outcome"], account["reason"]) == ("spliced", "spliced")
        assert account["tokens"]["spliced"] > 0
        edit = account["edits"][0]
        assert (edit["role"], edit["cause"], edit["mode"]) == (
            "tool",
            "policy:truncate_older_than",
            "amortize",
        )


def test_a_policy_edits_from_the_first_turn_on(sdk: openai.OpenAI, model: str) -> None:
    """A list that comes long is edited before anything is cached; the next turn splices one edit
    more, lists it alone, and counts the lasting ones; a list sent twice has no new edit."""
    names = {"x-leyline-session": "long at first"}

    def turn(results: int) -> dict[str, Any]:
        messages = conversation(results, "Long at first.")
        return ask(sdk, model, messages, stream=False, policy=POLICY, headers=names)

    accounts = [turn(4), turn(5), turn(5)]
    assert [(account["outcome"], account["reason"]) for account in accounts] == [
        ("edited", "nothing_cached"),
        ("spliced", "spliced"),
        ("edited", "standing"),
    ]
    listed = [[(edit["message"], edit["cached"]) for edit in a["edits"]] for a in accounts]
    assert listed == [[(3, False), (5, False)], [(7, True)], []]
    assert [[kept["messages"] for kept in a["standing"]] for a in accounts] == [[], [2], [3]]
    assert all(map(adds_up, accounts))
    assert accounts[-1]["tokens"]["prefilled"] < 40, "edits that stand cost no cached token"


def test_headers_and_the_session_document(sdk: openai.OpenAI, model: str, origin: str) -> None:
    """Headers sum up the receipt, and the session lists its turns without any text."""
    names = {"x-leyline-session": "headers"}
    for turn in (2, 3):
        raw = sdk.chat.completions.with_raw_response.create(
            model=model,
            messages=cast("Any", conversation(turn, "Headers.")),
            max_tokens=1,
            extra_headers=names,
            extra_body={"leyline": {"policy": POLICY}},
        )
    account = raw.parse().model_extra["leyline"]  # type: ignore[index]
    tokens = account["tokens"]
    assert raw.headers["x-leyline-session"] == "headers"
    assert raw.headers["x-leyline-outcome"] == "spliced"
    assert raw.headers["x-leyline-spliced-tokens"] == str(tokens["spliced"])
    assert raw.headers["x-leyline-cached-tokens"] == str(tokens["prefix"] + tokens["spliced"])
    answer = httpx.get(f"{origin}/v1/leyline/sessions/headers")
    document = answer.json()
    assert [turn["receipt"]["outcome"] for turn in document["history"]] == ["unedited", "spliced"]
    assert "module_1" not in answer.text
    assert "Headers." not in answer.text


def test_a_session_is_known_by_its_history(sdk: openai.OpenAI, model: str) -> None:
    """Without any name, the conversation that a message list extends or edits is found."""
    first = ask(sdk, model, conversation(1, "History."), stream=False)
    second = ask(sdk, model, conversation(2, "History."), stream=False)
    other = ask(sdk, model, conversation(2, "Another."), stream=False)
    assert first["session"] == second["session"] != other["session"]
    assert second["outcome"] == "unedited"
    assert second["tokens"]["prefix"] >= first["tokens"]["prompt"] - 16


def test_undeclared_edits_splice_only_where_mapped(sdk: openai.OpenAI, model: str) -> None:
    """A harness that truncates by itself is exact, unless its tool results are mapped."""
    outcomes = {}
    for name, undeclared in (("exact", {}), ("mapped", {"tool": "amortize"})):
        headers = {"x-leyline-session": f"undeclared-{name}"}
        full = conversation(3, f"Undeclared {name}.")
        ask(sdk, model, full, stream=False, headers=headers)
        cut = [dict(message) for message in full]
        cut[3]["content"] = "(output left out)"
        account = ask(sdk, model, cut, stream=False, headers=headers, undeclared=undeclared)
        outcomes[name] = (account["outcome"], account["edits"][0]["cause"])
        assert adds_up(account)
        assert (account["tokens"]["spliced"] > 0) == (name == "mapped")
    assert outcomes == {
        "exact": ("reprefilled", "undeclared"),
        "mapped": ("spliced", "undeclared"),
    }


def test_a_declared_edit_is_applied_and_spliced(sdk: openai.OpenAI, model: str) -> None:
    """The caller may leave the cutting to the proxy."""
    headers = {"x-leyline-session": "declared"}
    messages = conversation(3, "Declared.")
    ask(sdk, model, messages, stream=False, headers=headers)
    edits = [{"message": 3, "replacement": "(left out)"}]
    account = ask(sdk, model, messages, stream=False, headers=headers, edits=edits)
    assert (account["outcome"], account["edits"][0]["cause"]) == ("spliced", "declared")


def test_forgetting_never_splices(sdk: openai.OpenAI, model: str) -> None:
    """A redaction keeps nothing that was computed after the secret was read."""
    headers = {"x-leyline-session": "forget"}
    messages = conversation(3, "Forget.")
    ask(sdk, model, messages, stream=False, headers=headers)
    account = ask(
        sdk, model, messages, stream=False, headers=headers, policy="redact:pattern='0007 [^ ]+'"
    )
    assert (account["outcome"], account["tokens"]["spliced"]) == ("reprefilled", 0)
    assert account["edits"][0]["mode"] == "forget"


def test_usage_in_streams(sdk: openai.OpenAI, model: str) -> None:
    """The usage chunk is the engine's, with spliced tokens counted as cached."""
    stream = sdk.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Usage?"}],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=2,
    )
    last = list(stream)[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens > 0


def test_leaving_mid_stream_keeps_the_session(sdk: openai.OpenAI, model: str, origin: str) -> None:
    """A caller that goes away is counted, and its next turn runs as if nothing had been."""
    headers = {"x-leyline-session": "leaves"}
    ask(sdk, model, conversation(1, "Leaves."), stream=False, headers=headers)
    stream = sdk.chat.completions.create(
        model=model,
        messages=cast("Any", conversation(2, "Leaves.")),
        stream=True,
        max_tokens=2000,
        extra_headers=headers,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    wait_for(origin, 'status="disconnected"')
    assert httpx.get(f"{origin}/v1/leyline/sessions/leaves").json()["turns"] == 1
    account = ask(sdk, model, conversation(2, "Leaves."), stream=False, headers=headers)
    assert (account["turn_index"], account["outcome"]) == (1, "unedited")


def wait_for(origin: str, text: str) -> None:
    """Wait until the metrics contain ``text``."""
    deadline = time.monotonic() + 20
    while text not in httpx.get(f"{origin}/metrics").text:
        assert time.monotonic() < deadline, f"no {text} in the metrics"
        time.sleep(0.05)


async def test_concurrent_requests_of_a_session(origin: str, model: str) -> None:
    """Requests of one session at the same time are all served, and all accounted."""
    headers = {"x-leyline-session": "concurrent"}
    async with openai.AsyncOpenAI(base_url=f"{origin}/v1", api_key="none") as sdk:

        async def turn(count: int) -> dict[str, Any]:
            answer = await sdk.chat.completions.create(
                model=model,
                messages=cast("Any", conversation(count, "Concurrent.")),
                max_tokens=2,
                extra_headers=headers,
                extra_body={"leyline": {"policy": POLICY}},
            )
            return cast("dict[str, Any]", (answer.model_extra or {})["leyline"])

        await turn(2)
        accounts = await asyncio.gather(turn(3), turn(4), turn(3), turn(4))
        last = await turn(5)
    assert all(map(adds_up, [*accounts, last]))
    assert last["outcome"] == "spliced"
    async with httpx.AsyncClient() as client:
        document = (await client.get(f"{origin}/v1/leyline/sessions/concurrent")).json()
    assert [turn["index"] for turn in document["history"]] == [0, 1, 2, 3, 4, 5]
    assert len({turn["turn"] for turn in document["history"]}) == 6
