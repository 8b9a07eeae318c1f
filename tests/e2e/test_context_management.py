"""``context_management`` in a request, as Anthropic's clients write it, on any model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.stack import embedded_stack

CHAT = "/v1/chat/completions"
COUNT = "/v1/leyline/count_tokens"
CLEAR = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": 2},
    "keep": {"type": "tool_uses", "value": 1},
}
THINKING = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
LISTING = "".join(f"drwxr-xr-x 2 dev dev 4096 folder_{n}\n" for n in range(30))


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A bare HTTP client of a whole stack."""
    options = {"pool_tokens": 32_768, "device": "cpu"}
    with (
        embedded_stack(options, log_level="error", allow_request_policy=False) as origin,
        httpx.Client(base_url=origin, timeout=60) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def model(client: httpx.Client) -> str:
    """The served model."""
    name: str = client.get("/v1/models").json()["data"][0]["id"]
    return name


def talk(calls: int, task: str) -> list[dict[str, Any]]:
    """An agent that has looked so often."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    for number in range(calls):
        function = {"name": "ls", "arguments": json.dumps({"path": f"dir{number}"})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        thought = f"I should look into dir{number}. " * 5
        messages += [
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": thought,
                "tool_calls": [call],
            },
            {"role": "tool", "tool_call_id": f"c{number}", "content": f"{number}\n{LISTING}"},
            {"role": "user", "content": "Go on."},
        ]
    return messages


def body(model: str, messages: list[dict[str, Any]], *edits: Any, **members: Any) -> dict[str, Any]:
    """A request that asks for edits."""
    management = {"context_management": {"edits": list(edits)}} if edits else {}
    return {"model": model, "messages": messages, "max_tokens": 1, **management, **members}


def test_the_edits_are_made_and_reported(client: httpx.Client, model: str) -> None:
    """Old results are cleared, spliced on a warm cache, and counted in ``applied_edits``."""
    headers = {"x-leyline-session": "managed"}
    first = client.post(CHAT, json=body(model, talk(2, "A."), CLEAR), headers=headers).json()
    assert first["context_management"] == {"applied_edits": []}
    answer = client.post(CHAT, json=body(model, talk(3, "A."), CLEAR), headers=headers).json()
    (applied,) = answer["context_management"]["applied_edits"]
    assert applied["type"] == CLEAR["type"]
    assert applied["cleared_tool_uses"] == 2
    assert applied["cleared_input_tokens"] > 100
    assert answer["leyline"]["outcome"] == "spliced"
    assert f"policy:{CLEAR['type']}" in {edit["cause"] for edit in answer["leyline"]["edits"]}


def test_streams_report_it_in_the_finish_chunk(client: httpx.Client, model: str) -> None:
    """The report is beside the account, once."""
    sent = body(model, talk(4, "B."), CLEAR, stream=True)
    lines = client.post(CHAT, json=sent).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    found = [event["context_management"] for event in events if "context_management" in event]
    assert [edit["cleared_tool_uses"] for edit in found[0]["applied_edits"]] == [3]
    assert len(found) == 1


def test_a_request_without_it_is_answered_without_it(client: httpx.Client, model: str) -> None:
    """The answer gets no unrequested additions."""
    assert "context_management" not in client.post(CHAT, json=body(model, talk(1, "C."))).json()


def test_the_preview_counts_what_the_request_would_cost(client: httpx.Client, model: str) -> None:
    """It counts before and after the edits, as the engine then does; nothing is run or
    remembered."""
    headers = {"x-leyline-session": "previewed"}
    sent = body(model, talk(4, "D."), THINKING, CLEAR)
    before = client.get("/v1/leyline/sessions").json()
    preview = client.post(COUNT, json=sent, headers=headers).json()
    assert client.get("/v1/leyline/sessions").json() == before
    plain = client.post(COUNT, json=body(model, talk(4, "D.")), headers=headers).json()
    answer = client.post(CHAT, json=sent, headers=headers).json()
    assert preview["input_tokens"] == answer["usage"]["prompt_tokens"]
    assert preview["context_management"]["original_input_tokens"] == plain["input_tokens"]
    assert plain == {"input_tokens": plain["input_tokens"]}
    assert plain["input_tokens"] > preview["input_tokens"]
    applied = preview["context_management"]["applied_edits"]
    assert applied == answer["context_management"]["applied_edits"]
    kinds = {edit["type"]: edit for edit in applied}
    assert kinds[THINKING["type"]]["cleared_thinking_turns"] == 3
    assert kinds[CLEAR["type"]]["cleared_tool_uses"] == 3


EDITS = "context_management.edits"


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ([], "context_management", "an object"),
        ({"edits": [], "more": 1}, "context_management", "an object"),
        ({"edits": ["x"]}, f"{EDITS}[0]", "a type"),
        ({"edits": [{"type": "clear_tool_use_20250919"}]}, f"{EDITS}[0].type", "did you mean"),
        ({"edits": [{"type": "summarize_20270101"}]}, f"{EDITS}[0].type", "isn't offered"),
        ({"edits": [{**CLEAR, "keep": {"type": "tool_uses", "value": -1}}]}, None, "value"),
        ({"edits": [{**CLEAR, "kept": 3}]}, f"{EDITS}[0]", "may have type, trigger"),
        ({"edits": [{**CLEAR, "trigger": {"type": "moon", "value": 1}}]}, None, "moon"),
        ({"edits": [CLEAR, CLEAR]}, EDITS, "twice"),
        ({"edits": [CLEAR, THINKING]}, EDITS, "first"),
        ({"edits": [CLEAR] * 9}, EDITS, "at most 8"),
    ],
)
def test_mistakes_name_the_field(
    client: httpx.Client, model: str, given: Any, param: str | None, words: str
) -> None:
    """A 400 in OpenAI's shape, with the fix."""
    sent = body(model, talk(1, "E.")) | {"context_management": given}
    for path in (CHAT, COUNT):
        response = client.post(path, json=sent)
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert words in error["message"]
        assert error["param"].startswith(param or EDITS)
